"""A reply in several generation chunks: the tokens before an interruption become part of the next prompt.

The next chunk may come from another server.
"""

from dataclasses import dataclass, field, replace

import numpy as np

from rollgym.trainer.core.seeding import derive_seed
from rollgym.trainer.inference.base import FinishReason, GenerationRequest, GenerationResult, SamplingParams
from rollgym.trainer.records.experts import Experts


@dataclass(slots=True)
class PartialReply:
    """One reply so far.

    Attributes:
        request: What was asked for.
        token_ids: Tokens of all stretches.
        logprobs: Of each, as it was drawn.
        policy_versions: Of each.
        experts: Those that tokens of the prompt and of all stretches took, if known.
    """

    request: GenerationRequest
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    policy_versions: list[int] = field(default_factory=list)
    experts: Experts | None = field(default=None, compare=False)

    @property
    def prompt_ids(self) -> list[int]:
        """What the next stretch reads."""
        return self.request.prompt_ids + self.token_ids

    @property
    def sampling(self) -> SamplingParams:
        """How the next stretch is drawn: with what is left of the budget."""
        sampling = self.request.sampling
        return replace(sampling, max_new_tokens=sampling.max_new_tokens - len(self.token_ids))

    @property
    def seed(self) -> int:
        """The next stretch's seed: the request's own for the first, one that follows from it and the place after.

        With the same seed again a stretch would draw the random numbers of the one before.
        """
        if not self.token_ids:
            return self.request.seed
        return derive_seed(self.request.seed, "stretch", len(self.token_ids))

    def begin_again(self) -> None:
        """Discard the tokens of a constrained reply: it cannot resume, since a grammar begins with the first token."""
        if self.request.sampling.structured is not None and self.token_ids:
            self.token_ids, self.logprobs, self.policy_versions = [], [], []
            self.experts = None

    def add(
        self,
        token_ids: list[int],
        logprobs: list[float],
        policy_versions: list[int],
        experts: Experts | None = None,
    ) -> None:
        """Append a stretch. What tokens of the stretches before took is known already."""
        if experts is not None:
            known = 0 if self.experts is None else len(self.experts)
            self.experts = (
                experts if self.experts is None else np.concatenate([self.experts, experts[known:]])
            )
        self.token_ids += token_ids
        self.logprobs += logprobs
        self.policy_versions += policy_versions

    def finished(self) -> FinishReason | None:
        """Say whether what is here is a whole reply, whatever interrupted its last stretch."""
        if self.token_ids and self.token_ids[-1] in self.request.sampling.stop_token_ids:
            return "stop"
        if len(self.token_ids) >= self.request.sampling.max_new_tokens:
            return "length"
        return None

    def result(self, finish_reason: FinishReason) -> GenerationResult:
        """Return it as it is."""
        return GenerationResult(
            self.token_ids, self.logprobs, self.policy_versions, finish_reason, self.experts
        )
