"""The service that answers agents: the policy, and the treatment of an agent's own sampling parameters."""

from dataclasses import dataclass, replace
from typing import Literal

from rollgym.trainer.core.seeding import derive_seed
from rollgym.trainer.inference.base import InferenceClient, SamplingParams
from rollgym.trainer.rollout.agents.calls import AgentCall, Wishes
from rollgym.trainer.rollout.agents.errors import ApiError, unsupported
from rollgym.trainer.rollout.agents.held_calls import held_reply
from rollgym.trainer.rollout.agents.replies import ToolFormat
from rollgym.trainer.rollout.agents.splicing import SplicingRenderer
from rollgym.trainer.rollout.agents.structured import Wanted

SamplingPolicy = Literal["run", "refuse", "agent"]
"""The treatment of an agent's own sampling parameters: ignored, refused, or heeded.

A run trains the distribution that it samples from, which is one for all replies; only if nothing is trained may an
agent choose.
"""


@dataclass(frozen=True, slots=True)
class PolicyService:
    """The policy and its settings, shared by all sessions.

    Attributes:
        client: The inference client.
        renderer: Makes prompts of conversations.
        sampling: Sampling parameters of replies.
        max_length: Longest row in tokens.
        model: The name that the policy has in the API.
        tool_format: The policy family's format of tool calls.
        wishes: How the agent's own sampling parameters are handled.
        seed: The run's seed.
        purpose: Name of the family of random streams, such as "train".
        reads_seeds: Whether the inference engine draws equal replies for equal seeds.
        unstructured: Why an agent cannot say what its replies must look like; empty if it can.
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
    reads_seeds: bool = True
    unstructured: str = ""

    def __post_init__(self) -> None:
        # Hermes' marks are the ones that it writes for templates that know no tools.
        if self.tool_format == "hermes":
            self.renderer.renderer.template.write_tools()

    def settled(self, call: AgentCall) -> tuple[AgentCall, tuple[str, ...]]:
        """Return a request with the constraint on its reply, and those of its fields that are ignored.

        Raises:
            ApiError: If they must not be.
        """
        wanted, unheld = held_reply(call, self.tool_format)
        if wanted is not None and wanted.spare and (self.unstructured or self.wishes == "refuse"):
            unheld, wanted = wanted.spare, None
        self._require_structured(wanted)
        settled = replace(call, wishes=replace(call.wishes, structured=wanted))
        return settled, self._ignored(call, unheld)

    def _ignored(self, call: AgentCall, unheld: tuple[str, ...]) -> tuple[str, ...]:
        heeded = self.wishes == "agent"
        unheeded = _unheeded(call.wishes, self.sampling, heeded=heeded)
        if unheeded and heeded:
            raise unsupported(f"{', '.join(unheeded)}: not supported here", unheeded[0])
        if unheeded and self.wishes == "refuse":
            raise _is_the_runs(*unheeded)
        unread = ("seed",) if heeded and call.wishes.seed is not None and not self.reads_seeds else ()
        return (*unheeded, *unread, *unheld, *call.not_enforced)

    def _require_structured(self, wanted: Wanted | None) -> None:
        if wanted is None:
            return
        if self.unstructured:
            raise unsupported(f"{wanted.param}: {self.unstructured}", wanted.param)
        if self.wishes == "refuse":
            raise _is_the_runs(wanted.param)

    def seed_for(self, wishes: Wishes, choice: int, *names: str | int) -> int:
        """Return the seed of a reply's random stream: the agent's own, if its parameters are heeded and include one.

        Args:
            wishes: The agent's sampling parameters.
            choice: Index of the reply among those to one request.
            names: Place of the reply among those of the run.
        """
        if self.wishes == "agent" and wishes.seed is not None:
            return derive_seed(self.seed, "agent", wishes.seed, choice)
        return derive_seed(self.seed, *names)

    def sampling_for(self, wishes: Wishes, prompt: int) -> SamplingParams:
        """Return how a reply is drawn, with the length that it may have.

        Args:
            wishes: The agent's sampling parameters.
            prompt: Tokens of the prompt.

        Raises:
            ApiError: If the prompt leaves no room for the reply.
        """
        return replace(
            self._distribution(wishes),
            max_new_tokens=self._longest(wishes.max_tokens, prompt),
            structured=None if wishes.structured is None else wishes.structured.output,
        )

    def _distribution(self, wishes: Wishes) -> SamplingParams:
        own = self.sampling
        if self.wishes != "agent":
            return own
        return replace(
            own,
            # As OpenAI has it, a mass of nothing leaves the most likely token.
            temperature=0.0 if wishes.top_p == 0 else _either(wishes.temperature, own.temperature),
            top_p=1.0 if wishes.top_p == 0 else _either(wishes.top_p, own.top_p),
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


def _is_the_runs(*names: str) -> ApiError:
    return ApiError(
        400,
        f"{', '.join(names)}: how replies are sampled is the run's own, since that distribution is trained "
        "(agents.sampling is 'refuse'; 'run' passes over such fields, and serves structured outputs)",
        "sampling_is_the_runs",
        names[0],
    )


def _either(wish: float | None, own: float) -> float:
    return own if wish is None else wish


def _unheeded(wishes: Wishes, sampling: SamplingParams, *, heeded: bool) -> tuple[str, ...]:
    """Name the wishes that are not what is done anyway; `heeded` is whether those that can be are."""
    if heeded:
        return wishes.others
    asked = {
        "temperature": (wishes.temperature, sampling.temperature),
        "top_p": (wishes.top_p, sampling.top_p),
        "top_k": (None if wishes.top_k is None else max(0, wishes.top_k), sampling.top_k),
    }
    unlike = [name for name, (wish, done) in asked.items() if wish is not None and wish != done]
    seeded = () if wishes.seed is None else ("seed",)
    return (*unlike, *wishes.others, *seeded)
