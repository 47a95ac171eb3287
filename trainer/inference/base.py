"""What the trainer asks of an inference engine: ids in, ids and their log-probabilities out."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn.

    Attributes:
        max_new_tokens: Longest reply.
        temperature: Divides the logits; 0 takes the most likely token.
        top_p: Smallest set of most likely tokens with this mass; 1 is off.
        top_k: Number of most likely tokens; 0 is off.
        stop_token_ids: Tokens that end a reply; the one that did is part of it.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One reply that is wanted.

    Attributes:
        request_id: Unique among the requests that wait.
        prompt_ids: All that the policy reads.
        sampling: How its tokens are drawn.
        seed: Seed of this request's own random stream.
        order: Place in a batch whose order must not depend on time.
    """

    request_id: str
    prompt_ids: list[int]
    sampling: SamplingParams
    seed: int
    order: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """One reply.

    Attributes:
        token_ids: What was sampled, the stop token included.
        logprobs: Log-probability of each token under the distribution that it was drawn from.
        policy_versions: Policy version that drew each token.
        finish_reason: "stop" if a stop token ended it, else "length".
    """

    token_ids: list[int]
    logprobs: list[float]
    policy_versions: list[int] = field(default_factory=list)
    finish_reason: Literal["stop", "length"] = "stop"


class InferenceClient(Protocol):
    """Samples from the policy."""

    @property
    def version(self) -> int:
        """The policy version that answers now."""
        ...

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Return one reply."""
        ...

    async def generate_together(self, requests: list[GenerationRequest]) -> list[GenerationResult]:
        """Return the replies of one batch, computed together and in the order given."""
        ...

    async def update_weights(self, state: Mapping[str, Tensor], version: int) -> None:
        """Take new weights."""
        ...

    async def close(self) -> None:
        """Stop."""
        ...
