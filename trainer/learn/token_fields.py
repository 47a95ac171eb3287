"""Inputs of losses for each token, beside its log-probability: typed here, tables by name in a backend."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Self

from torch import Tensor

from rollgym.trainer.backends.base import TrainRow
from rollgym.trainer.backends.batching import pad_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class _TokenFields:
    @classmethod
    def of(cls, named: Mapping[str, Tensor]) -> Self:
        """Read what a backend passed on, of a row or of a micro-batch.

        Raises:
            TypeError: If something is missing or not known here.
        """
        return cls(**named)

    @classmethod
    def padded(cls, rows: Sequence[TrainRow]) -> Self:
        """Return those of rows as one, `[rows, tokens]`, zero after each row's end."""
        return cls(**{name: pad_rows([row.fields[name] for row in rows]) for name in rows[0].fields})

    def named(self) -> dict[str, Tensor]:
        """Return what a backend passes on: those that there are, by name."""
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in found.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyFields(_TokenFields):
    """The inputs of the losses of the policy and its critic, `[tokens]` of a row or `[rows, tokens]` of a micro-batch.

    Attributes:
        behaviour_logprobs: Log-probabilities as the tokens were sampled, float32.
        advantages: Advantages, float32.
        turn_index: The turn that each token is of, int64; -1 outside replies.
        old_logprobs: Log-probabilities at the start of the update, float32; None if they are unused.
        reference_logprobs: Those of the policy as the run began, float32; None without a KL penalty.
        values: The critic's values at the start of the update, float32; None without one.
        returns: Targets of the critic, float32; None without one.
        shares: Each token's position between the policy that sampled it and the trained one, float32;
            None if ratios do not start between them.
        weights: Weights of tokens in the policy's loss, float32; None if all weigh the same.
        charges: Amount to subtract from each token's advantage, float32; None for zero.
    """

    behaviour_logprobs: Tensor
    advantages: Tensor
    turn_index: Tensor
    old_logprobs: Tensor | None = None
    reference_logprobs: Tensor | None = None
    values: Tensor | None = None
    returns: Tensor | None = None
    shares: Tensor | None = None
    weights: Tensor | None = None
    charges: Tensor | None = None

    @property
    def old(self) -> Tensor:
        """The old log-probabilities, for an algorithm that reads them.

        Raises:
            ValueError: If these are rows of one that does not.
        """
        if self.old_logprobs is None:
            raise ValueError("these rows hold no log-probabilities of the start of the update")
        return self.old_logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class TaughtFields(_TokenFields):
    """The inputs of distillation by sampled tokens, `[tokens]` of a row or `[rows, tokens]` of a micro-batch.

    Attributes:
        behaviour_logprobs: Log-probabilities as the tokens were sampled, float32.
        taught_logprobs: The teacher's, float32.
    """

    behaviour_logprobs: Tensor
    taught_logprobs: Tensor
