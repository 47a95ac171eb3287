"""Losses of micro-batches as backends call them: functions that can be sent to other processes."""

from torch import Tensor

from rollgym.trainer.algorithms.aggregation import Denominators, Metrics
from rollgym.trainer.algorithms.batch import LossInputs
from rollgym.trainer.algorithms.objective import critic_loss, policy_loss
from rollgym.trainer.algorithms.settings import AlgorithmSettings
from rollgym.trainer.backends.base import MicroBatch
from rollgym.trainer.learn.token_fields import PolicyFields


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
        rest: What the other rows of each row's episode add to a ratio of sequences, `[2, rows]`.
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
