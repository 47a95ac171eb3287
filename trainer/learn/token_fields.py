"""Inputs of losses for each token, beside its log-probability, and the losses of micro-batches as backends call them.

The inputs are typed here, and tables by name in a backend. Losses are functions that can be sent to other processes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Self

from torch import Tensor

from rollgym.trainer.algorithms.aggregation import Denominators, Metrics
from rollgym.trainer.algorithms.batch import LossInputs
from rollgym.trainer.algorithms.objective import critic_loss, policy_loss
from rollgym.trainer.algorithms.settings import AlgorithmSettings
from rollgym.trainer.backends.base import MicroBatch, TrainRow
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


def policy_share(
    micro: MicroBatch,
    settings: AlgorithmSettings,
    scores: Tensor,
    lengths: Tensor,
    rest: Tensor | None,
    counts: Denominators,
) -> tuple[Tensor, Metrics]:
    """Return a micro-batch's share of the policy's loss.

    Args:
        micro: The micro-batch.
        settings: The algorithm.
        scores: Return of the trajectory of each row of the optimizer step.
        lengths: Sampled tokens of the sequence that each row is of.
        rest: What the other rows of its episode add to each row's sequence-level ratio, `[2, rows]`.
        counts: Counts of the whole optimizer step.
    """
    elsewhere_difference, elsewhere_tokens = (
        (None, None) if rest is None else rest.to(micro.rows.device)[:, micro.rows]
    )
    fields = PolicyFields.of(micro.fields)
    inputs = LossInputs(
        logprobs=micro.outputs,
        behaviour_logprobs=fields.behaviour_logprobs,
        advantages=fields.advantages,
        mask=micro.mask,
        turn_index=fields.turn_index,
        old_logprobs=fields.old_logprobs,
        reference_logprobs=fields.reference_logprobs,
        entropy=micro.entropy,
        scores=scores.to(micro.rows.device)[micro.rows],
        lengths=lengths.to(micro.rows.device)[micro.rows],
        elsewhere_difference=elsewhere_difference,
        elsewhere_tokens=elsewhere_tokens,
        weights=fields.weights,
        charges=fields.charges,
        shares=fields.shares,
    )
    return policy_loss(settings, inputs, counts)


def critic_share(
    micro: MicroBatch, settings: AlgorithmSettings, lengths: Tensor, counts: Denominators
) -> tuple[Tensor, Metrics]:
    """Return a micro-batch's share of the critic's loss; see `policy_share`."""
    fields = PolicyFields.of(micro.fields)
    if fields.values is None or fields.returns is None:
        raise ValueError("the critic's loss reads values and returns, which these rows lack")
    totals = lengths.to(micro.rows.device)[micro.rows]
    return critic_loss(settings, micro.outputs, fields.values, fields.returns, micro.mask, counts, totals)
