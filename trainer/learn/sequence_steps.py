"""Optimizer steps of losses that couple the rows of a batch, such as the two replies of a pair.

Such a loss reads one number of each row, the sum of its outputs, and rows of one pair may be computed in different
micro-batches, or by different ranks. So it is computed in two passes. The first, without gradient, gives all sums; the
loss of the sums and its derivative by each of them, w, follow in the run's own process. The second pass trains on the
sum of w times each row's outputs, whose gradient by the weights is that of the loss (the chain rule), whatever the cut.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from trainer.algorithms.metrics import Metrics
from trainer.backends.base import MicroBatch, Scorer, StepReport, TrainBackend, TrainRow


@dataclass(frozen=True, slots=True)
class Sums:
    """What a loss reads of a batch, `[rows]` each.

    Attributes:
        outputs: Sum of the outputs of each row, float64, with gradient.
        tokens: Number of them.
    """

    outputs: Tensor
    tokens: Tensor


CoupledLoss = Callable[[Sums], tuple[Tensor, dict[str, float]]]
"""Returns the loss of a batch, and metrics."""


def row_sums(scorer: Scorer, rows: Sequence[TrainRow]) -> Tensor:
    """Return the sum of each row's outputs, float64 `[rows]`, without gradient."""
    outputs = scorer.forward(rows)
    return torch.stack([line[row.mask].double().sum() for line, row in zip(outputs, rows, strict=True)])


def token_counts(rows: Sequence[TrainRow]) -> Tensor:
    """Return the number of each row's outputs, float64 `[rows]`."""
    return torch.tensor([float(row.mask.sum()) for row in rows], dtype=torch.float64)


def coupled_step(
    backend: TrainBackend, rows: Sequence[TrainRow], loss: CoupledLoss
) -> tuple[StepReport, dict[str, float]]:
    """Take one optimizer step of a loss that couples rows.

    Args:
        backend: What is trained.
        rows: The batch.
        loss: The loss of the whole batch.

    Returns:
        What became of the step, and the loss's metrics from before it.
    """
    sums = row_sums(backend, rows).requires_grad_()
    value, metrics = loss(Sums(sums, token_counts(rows)))
    (weights,) = torch.autograd.grad(value, sums)
    # A loss that is not finite has to leave the step out, as one that a backend computes itself does.
    weights = weights if bool(value.isfinite()) else torch.full_like(weights, torch.nan)
    report = backend.step(rows, partial(_weighted_outputs, weights=weights.float()))
    return report, metrics | {"loss": float(value.detach())}


def _weighted_outputs(micro: MicroBatch, weights: Tensor) -> tuple[Tensor, Metrics]:
    share = weights.to(micro.rows.device)[micro.rows]
    return (torch.where(micro.mask, micro.outputs, 0.0).sum(dim=1) * share).sum(), {}
