"""Learning from preferences: of two replies the better one becomes likelier, or gets the higher reward."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from rollgym.trainer.algorithms.aggregation import Metrics
from rollgym.trainer.algorithms.loss_settings import PreferenceLossSettings
from rollgym.trainer.algorithms.preference import (
    PreferenceResult,
    Replies,
    bradley_terry_loss,
    paired_loss,
    unpaired_loss,
)
from rollgym.trainer.backends.base import MicroBatch, Scorer, StepReport, TrainBackend, TrainRow
from rollgym.trainer.backends.optimizer import SkippedSteps
from rollgym.trainer.learn.pipelines.offline import runs_of_indices
from rollgym.trainer.learn.pipelines.sft import step_metrics

_AT_ONCE = 256
"""Rows whose outputs are held at one time if nothing is trained."""


@dataclass(frozen=True, slots=True)
class Sums:
    """The inputs of a loss for a batch, `[rows]` each.

    Attributes:
        outputs: Sum of the outputs of each row, float64, with gradient.
        tokens: Number of them.
    """

    outputs: Tensor
    tokens: Tensor


CoupledLoss = Callable[[Sums], tuple[Tensor, dict[str, float]]]
"""Returns the loss of a batch, and metrics."""


@dataclass(frozen=True, slots=True)
class PreferenceRows:
    """Examples as rows.

    Attributes:
        rows: Rows of each example. Of pairs: the chosen reply, the rejected one. Of judged replies: the reply, and its
            prompt with another example's reply, which measures the distance to the reference.
        good: Whether each judged reply is good.
        margins: By how much the replies of each pair differ; read by reward models.
    """

    rows: Sequence[tuple[TrainRow, TrainRow]]
    good: Sequence[bool] = ()
    margins: Sequence[float] = ()

    @property
    def lengths(self) -> list[int]:
        """Number of tokens of each example."""
        return [len(first.ids) + len(second.ids) for first, second in self.rows]

    def flat(self, indices: Sequence[int]) -> list[TrainRow]:
        """Return the rows of some examples: the first ones of all, then the second ones."""
        return [self.rows[index][0] for index in indices] + [self.rows[index][1] for index in indices]


def reference_sums(
    scorer: Scorer, examples: PreferenceRows, done: Callable[[int], object] = lambda _: None
) -> Tensor:
    """Return the log-probabilities of all rows under the reference, float64 `[examples, 2]`.

    Args:
        scorer: The reference.
        examples: The rows.
        done: Called with the number of examples computed so far.
    """
    parts = []
    for part in runs_of_indices(range(len(examples.rows)), _AT_ONCE // 2):
        parts.append(row_sums(scorer, examples.flat(part)).reshape(2, len(part)).T)
        done(part.stop)
    return torch.cat(parts) if parts else torch.zeros(0, 2, dtype=torch.float64)


class Preference:
    """Minimises a loss of preferences.

    Args:
        backend: The policy.
        loss: The kind of loss.
        examples: The training examples.
        reference: The log-probabilities of their rows under the reference, `[examples, 2]`; zeros without one.
        held_out: Examples for evaluation only.
        held_out_reference: Their log-probabilities.
        max_skipped_steps: Steps in a row that may be skipped because loss or gradient is not finite.
        say: Receives messages for people about skipped steps.
    """

    def __init__(
        self,
        backend: TrainBackend,
        loss: PreferenceLossSettings,
        examples: PreferenceRows,
        reference: Tensor,
        held_out: PreferenceRows,
        held_out_reference: Tensor,
        max_skipped_steps: int,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._backend = backend
        self._loss = loss
        self._examples, self._reference = examples, reference
        self._held_out, self._held_out_reference = held_out, held_out_reference
        self._skipped = SkippedSteps("policy", max_skipped_steps, say)

    def update(self, indices: Sequence[int]) -> dict[str, float]:
        """Take an optimizer step on the examples at some indices, and return its metrics.

        Raises:
            RunError: If too many steps in a row were left out.
        """
        rows = self._examples.flat(indices)
        taken, metrics = coupled_step(
            self._backend, rows, self._coupled(self._examples, self._reference, indices)
        )
        self._skipped.note(applied=taken.applied, why=taken.broken)
        return step_metrics(taken) | {f"preference/{name}": value for name, value in metrics.items()}

    def measure(self) -> dict[str, float]:
        """Return loss and accuracy of the held-out examples; empty if there are none."""
        if not self._held_out.rows:
            return {}
        indices = range(len(self._held_out.rows))
        sums = reference_sums(self._backend, self._held_out).T.reshape(-1)
        loss = self._coupled(self._held_out, self._held_out_reference, indices)
        value, metrics = loss(Sums(sums, token_counts(self._held_out.flat(indices))))
        return {"loss": float(value)} | metrics

    def _coupled(self, examples: PreferenceRows, reference: Tensor, indices: Sequence[int]) -> CoupledLoss:
        good = torch.tensor([examples.good[index] for index in indices]) if examples.good else None
        return partial(_loss, settings=self._loss, reference=reference[list(indices)], good=good)


class Ranking:
    """Trains a reward model: the better reply of a pair gets the higher number.

    Args:
        backend: The model, whose one output of a row is its reward.
        centre: Weight of the pull of rewards towards zero.
        examples: Pairs.
        held_out: Pairs that are measured only.
        max_skipped_steps: Steps in a row that may be skipped because loss or gradient is not finite.
        say: Receives messages for people about skipped steps.
    """

    def __init__(
        self,
        backend: TrainBackend,
        centre: float,
        examples: PreferenceRows,
        held_out: PreferenceRows,
        max_skipped_steps: int,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._backend = backend
        self._centre = centre
        self._examples, self._held_out = examples, held_out
        self._skipped = SkippedSteps("reward model", max_skipped_steps, say)

    def update(self, indices: Sequence[int]) -> dict[str, float]:
        """Take an optimizer step on the pairs at some indices, and return its metrics.

        Raises:
            RunError: If too many steps in a row were left out.
        """
        margins = torch.tensor([self._examples.margins[index] for index in indices], dtype=torch.float64)
        loss = partial(_ranking_loss, margins=margins, centre=self._centre)
        taken, metrics = coupled_step(self._backend, self._examples.flat(indices), loss)
        self._skipped.note(applied=taken.applied, why=taken.broken)
        return step_metrics(taken) | {f"reward/{name}": value for name, value in metrics.items()}

    def measure(self) -> dict[str, float]:
        """Return loss and accuracy of the held-out pairs; empty if there are none."""
        if not self._held_out.rows:
            return {}
        rewards = reference_sums(self._backend, self._held_out)
        margins = torch.tensor(self._held_out.margins, dtype=torch.float64)
        value, metrics = _ranking_loss(
            Sums(rewards.T.reshape(-1), torch.ones(2 * len(rewards))), margins, self._centre
        )
        return {"loss": float(value)} | metrics


def _loss(
    sums: Sums, settings: PreferenceLossSettings, reference: Tensor, good: Tensor | None
) -> tuple[Tensor, dict[str, float]]:
    count = len(reference)
    first = Replies(sums.outputs[:count], sums.tokens[:count], reference[:, 0])
    second = Replies(sums.outputs[count:], sums.tokens[count:], reference[:, 1])
    if good is None:
        result = paired_loss(settings, first, second)
        return result.loss, _metrics(result) | {
            "accuracy": float((result.chosen > result.rejected).double().mean()),
            "margin": float((result.chosen - result.rejected).mean()),
        }
    result = unpaired_loss(settings, first, good, second)
    return result.loss, _metrics(result)


def _metrics(result: PreferenceResult) -> dict[str, float]:
    parts = {"reward_chosen": result.chosen, "reward_rejected": result.rejected}
    return {name: float(part.mean()) for name, part in parts.items() if len(part)}


def _ranking_loss(sums: Sums, margins: Tensor, centre: float) -> tuple[Tensor, dict[str, float]]:
    chosen, rejected = sums.outputs.chunk(2)
    loss = bradley_terry_loss(chosen, rejected, margins, centre)
    difference = (chosen - rejected).detach()
    return loss, {
        "accuracy": float((difference > 0).double().mean()),
        "margin": float(difference.mean()),
        "mean": float(sums.outputs.detach().mean()),
    }


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
    """Take one optimizer step of a loss that couples rows, such as the two replies of a pair.

    Such a loss reads one number of each row, the sum of its outputs, and rows of one pair may be computed in different
    micro-batches, or by different ranks. So it is computed in two passes. The first, without gradient, gives all sums;
    the loss of the sums and its derivative by each of them, w, follow in the run's own process. The second pass trains
    on the sum of w times each row's outputs, whose gradient by the weights is that of the loss (the chain rule),
    whatever the cut.

    Args:
        backend: The model that is trained.
        rows: The batch.
        loss: The loss of the whole batch.

    Returns:
        The step's report, and the loss's metrics from before it.
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
