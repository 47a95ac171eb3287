"""What answers agents: the policy, and what becomes of an agent's own wishes for the sampling."""

from dataclasses import dataclass, replace
from typing import Literal

from rollgym.trainer.inference.base import InferenceClient, SamplingParams
from rollgym.trainer.rollout.agents.calls import AgentCall, Wishes
from rollgym.trainer.rollout.agents.errors import ApiError, unsupported
from rollgym.trainer.rollout.agents.replies import ToolFormat
from rollgym.trainer.rollout.agents.splicing import SplicingRenderer

SamplingPolicy = Literal["run", "refuse", "agent"]
"""What becomes of an agent's own wishes for the sampling: passed over, refused, or heeded.

A run trains the distribution that it samples from, which is one for all replies; only where nothing is trained may an
agent choose.
"""


@dataclass(frozen=True, slots=True)
class PolicyService:
    """What answers, and how: the same for all sessions.

    Attributes:
        client: Where replies are sampled.
        renderer: Makes prompts of conversations.
        sampling: How replies are drawn.
        max_length: Longest row in tokens.
        model: The name that the policy has in the API.
        tool_format: How the policy's family writes calls of tools.
        wishes: What becomes of an agent's own wishes for the sampling.
        seed: The run's seed.
        purpose: Name of the family of random streams, such as "train".
    """

    client: InferenceClient
    renderer: SplicingRenderer
    sampling: SamplingParams
    max_length: int
    model: str
    tool_format: ToolFormat
    wishes: SamplingPolicy
    seed: int
    purpose: str

    def ignored(self, call: AgentCall) -> tuple[str, ...]:
        """Return the wishes of a request that are passed over.

        Raises:
            ApiError: If they must not be.
        """
        unheeded = _unheeded(call.wishes, self.sampling, heeded=self.wishes == "agent")
        if unheeded and self.wishes == "agent":
            raise unsupported(f"{', '.join(unheeded)}: not supported here", unheeded[0])
        if unheeded and self.wishes == "refuse":
            raise ApiError(
                400,
                f"{', '.join(unheeded)}: how replies are sampled is the run's own, since that distribution is trained "
                "(agents.sampling is 'refuse'; 'run' passes over such fields)",
                "sampling_is_the_runs",
                unheeded[0],
            )
        return (*unheeded, *call.not_enforced)

    def sampling_for(self, wishes: Wishes, prompt: int) -> SamplingParams:
        """Return how a reply is drawn, with the length that it may have.

        Args:
            wishes: What the agent would like.
            prompt: Tokens of the prompt.

        Raises:
            ApiError: If the prompt leaves no room for the reply.
        """
        return replace(self._distribution(wishes), max_new_tokens=self._longest(wishes.max_tokens, prompt))

    def _distribution(self, wishes: Wishes) -> SamplingParams:
        own = self.sampling
        if self.wishes != "agent":
            return own
        return replace(
            own,
            temperature=own.temperature if wishes.temperature is None else wishes.temperature,
            top_p=own.top_p if not wishes.top_p else wishes.top_p,
            top_k=own.top_k if wishes.top_k is None else max(0, wishes.top_k),
        )

    def _longest(self, wanted: int | None, prompt: int) -> int:
        own = self.sampling.max_new_tokens
        longest = own if wanted is None else min(wanted, own)
        room = self.max_length - prompt
        if self.wishes == "agent" and wanted is None:
            longest = min(longest, room)
        if longest < 1 or longest > room:
            raise ApiError(
                400,
                f"the prompt has {prompt} tokens; with a reply of up to {max(1, longest)} it passes the longest row of "
                f"{self.max_length} (model.max_length)",
                "context_length_exceeded",
                "messages",
            )
        return longest


def _unheeded(wishes: Wishes, sampling: SamplingParams, *, heeded: bool) -> tuple[str, ...]:
    """Name the wishes that are not what is done anyway; `heeded` is whether those that can be are."""
    if heeded:
        return tuple(name for name in wishes.others if name != "seed")
    asked = {
        "temperature": (wishes.temperature, sampling.temperature),
        "top_p": (wishes.top_p, sampling.top_p),
        "top_k": (None if wishes.top_k is None else max(0, wishes.top_k), sampling.top_k),
    }
    unlike = [name for name, (wish, done) in asked.items() if wish is not None and wish != done]
    return (*unlike, *wishes.others)
