"""The interface between the trainer and inference engines: ids in, ids and their log-probabilities out.

It uses no type of torch: the policy may be sampled in this process or on remote servers.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from rollgym.trainer.records.experts import Experts
from rollgym.trainer.records.images import PlacedImage

FinishReason = Literal["stop", "length", "abort"]
"""Why a reply ended: with a stop token, at its largest length, or because the client was asked to abort it."""

PauseMode = Literal["wait", "abort", "keep", "recompute"]
"""What becomes of replies under way when generation pauses.

`wait` lets them end first. `abort` ends them with what they have, and the client takes them up again afterwards, their
tokens as part of the prompt. `keep` freezes them with their keys and values, `recompute` without: those are computed
again, with the weights that then hold.
"""


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """The form that a reply must have: from the first token on, tokens that would violate it are not drawn.

    Attributes:
        kind: `json` for a JSON schema, `regex`, `grammar` for a context-free grammar, or `structural_tag` for JSON
            between marks.
        text: Its source; a grammar in a syntax that the sampler reads: GBNF (also called EBNF) or Lark; a structural
            tag as the JSON that xgrammar reads.
    """

    kind: Literal["json", "regex", "grammar", "structural_tag"]
    text: str


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn.

    Attributes:
        max_new_tokens: Longest reply.
        temperature: Divides the logits; 0 takes the most likely token.
        top_p: Smallest set of most likely tokens with this mass; 1 is off.
        top_k: Number of most likely tokens; 0 is off.
        stop_token_ids: Tokens that end a reply; the one that did is part of it.
        routed_experts: Whether the experts that tokens took are wanted.
        structured: What the reply must look like. Tokens are drawn from what it leaves of the distribution, before
            top-k and top-p, and their log-probabilities are those of what is left.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()
    routed_experts: bool = False
    # Logs of earlier releases name how a reply was drawn without it.
    structured: StructuredOutput | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request for one reply.

    Attributes:
        request_id: Unique among the requests that wait.
        prompt_ids: All that the policy reads.
        images: Pictures among it, and the tokens that stand for them, in order.
        sampling: How its tokens are drawn.
        seed: Seed of this request's own random stream.
        order: Place in a batch whose order must not depend on time.
        session_key: Names the episode. Of several servers, its requests go to the one whose prefix cache holds its
            past.
        priority: Of requests that wait, the smallest is next; equal ones in the order in which they came.
        on_tokens: Called in the event loop with ids as they are drawn, in order. A client that cannot stream, or takes
            a reply from elsewhere, never calls it. If a reply is drawn again because its server was lost, the final
            ids may differ from those that it received.
    """

    request_id: str
    prompt_ids: list[int]
    sampling: SamplingParams
    seed: int
    order: tuple[int, ...] = ()
    session_key: str = ""
    priority: int = 0
    images: tuple[PlacedImage, ...] = ()
    on_tokens: Callable[[Sequence[int]], None] | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """One reply.

    Attributes:
        token_ids: What was sampled, the stop token included.
        logprobs: Log-probability of each token under the distribution that it was drawn from.
        policy_versions: Policy version that drew each token.
        finish_reason: "abort" only after a call of `InferenceClient.abort`: a client that is interrupted by new
            weights resumes by itself.
        experts: Experts that tokens of prompt and reply took, from the first on; None if not requested or unknown.
    """

    token_ids: list[int]
    logprobs: list[float]
    policy_versions: list[int] = field(default_factory=list)
    finish_reason: FinishReason = "stop"
    experts: Experts | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class InferenceCounters:
    """Totals of a client since it was made.

    Attributes:
        requests: Replies that were asked for.
        prompt_tokens: Tokens of their prompts.
        tokens_generated: Tokens that were sampled.
        resubmitted: How often a reply that was interrupted was taken up again.
        running: Replies that are under way now.
    """

    requests: int = 0
    prompt_tokens: int = 0
    tokens_generated: int = 0
    resubmitted: int = 0
    running: int = 0


@dataclass(frozen=True, slots=True)
class InferenceHealth:
    """State of an inference client.

    Attributes:
        ready: Whether a request would be answered now.
        detail: What is wrong, or a word on who answers; for people.
    """

    ready: bool
    detail: str = ""


class WeightSource(Protocol):
    """Weights of one version, in each of the forms that a client may take them in."""

    def tensors(self) -> Iterator[tuple[str, Any]]:
        """Yield tensors by their Hugging Face names, always in one order; tied ones once, under the first name.

        They are the trainer's own: valid until training resumes. A caller that keeps them copies them.
        """
        ...

    def parameters(self) -> Iterator[tuple[str, Any]]:
        """Yield the same by the names of the model's modules in this process, for a client that has such a model.

        They differ from those of the Hugging Face hub where the library holds several tensors as one (experts).
        """
        ...

    def require_held(self) -> None:
        """Make sure that what was read of `tensors` is of this version, once it has been copied or sent.

        Raises:
            WeightsReleasedError: If training has resumed since.
        """
        ...

    async def folder(self) -> Path:
        """Return a directory in Hugging Face layout with these weights, written once however many ask."""
        ...


@runtime_checkable
class AdapterSource(Protocol):
    """Weights whose trained part is an adapter that servers can load beside the base model."""

    async def adapter_folder(self) -> Path:
        """Return a directory in the layout of peft with the adapter alone, written once however many ask."""
        ...


def check_length(request: GenerationRequest, longest: int | None, whose: str) -> None:
    """Refuse a request without a prompt, or of more tokens than the longest row; `whose` says which limit that is.

    Raises:
        ValueError: If it cannot be answered.
    """
    if not request.prompt_ids:
        raise ValueError(f"request {request.request_id} has an empty prompt")
    tokens, most = len(request.prompt_ids), request.sampling.max_new_tokens
    if longest is not None and tokens + most > longest:
        raise ValueError(
            f"request {request.request_id}: a prompt of {tokens} tokens and a reply of up to {most} pass the longest "
            f"row of {whose}"
        )


class InferenceClient(Protocol):
    """Samples replies from the policy, in process or on servers."""

    @property
    def version(self) -> int:
        """The policy version that answers now."""
        ...

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Return the reply to one request, once it has ended."""
        ...

    async def generate_together(self, requests: list[GenerationRequest]) -> list[GenerationResult]:
        """Return the replies of one batch, computed together and in the order given."""
        ...

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        """End replies with the tokens that they have, all if `request_ids` is None; return how many."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Stop generating; requests that come meanwhile wait. Pausing what is paused changes nothing."""
        ...

    async def resume(self) -> None:
        """Resume generating; no effect if not paused."""
        ...

    async def sync(self, source: WeightSource, version: int) -> None:
        """Take new weights; replies in flight continue with them, and each token names the version that drew it."""
        ...

    async def health(self) -> InferenceHealth:
        """Return whether a request would be answered now."""
        ...

    @property
    def counters(self) -> InferenceCounters:
        """Totals of requests and tokens so far."""
        ...

    async def close(self) -> None:
        """Stop sampling, and release the client's resources."""
        ...
