"""Supervised learning: every reply becomes more likely, token by token."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from rollgym.trainer.algorithms.aggregation import Denominators, Metrics, aggregate, collect, means
from rollgym.trainer.backends.base import MicroBatch, Scorer, StepReport, TrainBackend, TrainRow
from rollgym.trainer.backends.optimizer import SkippedSteps
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.learn.batches import trajectory_rows
from rollgym.trainer.learn.pipelines.offline import ExampleBatches, runs_of_indices
from rollgym.trainer.records.trajectory import Trajectory

_MEASURED_AT_ONCE = 256
"""Held-out rows whose outputs are held at one time."""


def supervised_rows(
    trajectories: Sequence[Trajectory], longest: int, say: Callable[[str], None]
) -> list[TrainRow]:
    """Return the training rows of episodes whose replies are to be imitated.

    Args:
        trajectories: The episodes.
        longest: `model.max_length`, in tokens; longer rows are left out.
        say: Called with the number of rows left out.

    Raises:
        ConfigError: If all rows are left out.
    """
    rows = [
        row for index, trajectory in enumerate(trajectories) for row in trajectory_rows(index, trajectory)
    ]
    kept = [row for row in rows if len(row.ids) <= longest]
    if rows and not kept:
        raise ConfigError(
            f"the expert's demonstrations take {min(len(row.ids) for row in rows)} tokens a row and more, and "
            f"model.max_length is {longest}: raise it, or show less with prompt.instruction"
        )
    if len(kept) < len(rows):
        left_out = len(rows) - len(kept)
        say(
            f"{left_out} of {len(rows)} rows of demonstrations are longer than model.max_length and are left out"
        )
    return [row.tensors() for row in kept]


class Imitation:
    """Minimises the mean negative log-likelihood of the learnt tokens of a batch.

    Args:
        backend: The policy.
        rows: The training rows.
        held_out: Rows for evaluation only.
        max_skipped_steps: Steps in a row that may be skipped because loss or gradient is not finite.
        what: Name of the trained model, for messages.
        say: Receives messages for people about skipped steps.
    """

    def __init__(
        self,
        backend: TrainBackend,
        rows: Sequence[TrainRow],
        held_out: Sequence[TrainRow] = (),
        *,
        max_skipped_steps: int = 8,
        what: str = "policy",
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._backend = backend
        self._rows = rows
        self._held_out = held_out
        self._skipped = SkippedSteps(what, max_skipped_steps, say)

    def update(self, indices: Sequence[int]) -> dict[str, float]:
        """Take an optimizer step on the rows at some indices, and return its metrics.

        Raises:
            RunError: If too many steps in a row were left out.
        """
        chosen = [self._rows[index] for index in indices]
        counts = Denominators.from_lengths(int(row.mask.sum()) for row in chosen)
        taken = self._backend.step(chosen, partial(_negative_log_likelihood, counts=counts))
        self._skipped.note(applied=taken.applied, why=taken.broken)
        metrics = step_metrics(taken) | {"supervised/tokens": float(counts.tokens)}
        loss = taken.metrics.get("loss/supervised")
        return metrics if loss is None else metrics | {"supervised/loss": loss[0]}

    def measure(self) -> dict[str, float]:
        """Return the loss of the held-out rows; empty if there are none."""
        return {"loss": -mean_output(self._backend, self._held_out)} if self._held_out else {}


def mean_output(scorer: Scorer, rows: Sequence[TrainRow]) -> float:
    """Return the mean of what a model gives of the marked tokens of rows, such as their log-probabilities."""
    total, tokens = 0.0, 0
    for part in runs_of_indices(range(len(rows)), _MEASURED_AT_ONCE):
        chosen = [rows[index] for index in part]
        for row, line in zip(chosen, scorer.forward(chosen), strict=True):
            total += float(line[row.mask].double().sum())
            tokens += int(row.mask.sum())
    return total / max(tokens, 1)


def step_metrics(taken: StepReport) -> dict[str, float]:
    """Return the metrics of an optimizer step."""
    numbers = {
        "policy/optimizer_steps": float(taken.applied),
        "policy/skipped_steps": float(not taken.applied),
    }
    if taken.applied:
        numbers["policy/gradient_norm"] = taken.gradient_norm
    if taken.tokens.rows:
        numbers["policy/shared_prefixes"] = 1.0 - taken.tokens.computed / taken.tokens.rows
    return numbers | {key: value for key, value in means(taken.metrics).items() if key != "loss/supervised"}


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a warm start has come.

    Attributes:
        batches: Optimizer steps taken.
        total: Optimizer steps in all.
        epoch: The epoch that ended with the last of them; None within an epoch.
        loss: Mean loss of that epoch's batches.
    """

    batches: int
    total: int
    epoch: int | None
    loss: float


def train_supervised(
    backend: TrainBackend,
    rows: Sequence[TrainRow],
    *,
    epochs: int,
    batch_rows: int,
    seed: int,
    max_skipped_steps: int,
    say: Callable[[str], None] = lambda text: None,
) -> Iterator[Progress]:
    """Imitate rows for some epochs; the work is done as the iterator is asked for more.

    Args:
        backend: The policy.
        rows: The training rows.
        epochs: Passes over all rows.
        batch_rows: Rows of one optimizer step.
        seed: The run's seed; the order of rows is drawn from a stream below it.
        max_skipped_steps: Steps in a row that may be skipped because loss or gradient is not finite.
        say: Receives messages for people about skipped steps.

    Yields:
        The progress, after every batch.

    Raises:
        RunError: If more steps than that are skipped.
    """
    imitation = Imitation(backend, rows, max_skipped_steps=max_skipped_steps, what="warm start", say=say)
    batches = ExampleBatches([len(row.ids) for row in rows], seed, batch_rows)
    losses: list[float] = []
    for number, batch in enumerate(batches.of_epochs(epochs), start=1):
        metrics = imitation.update(batch.indices)
        if "supervised/loss" in metrics:
            losses.append(metrics["supervised/loss"])
        mean = sum(losses) / len(losses) if losses else math.nan
        yield Progress(number, batches.steps(epochs), batch.epoch if batch.ends_epoch else None, mean)
        if batch.ends_epoch:
            losses = []


def _negative_log_likelihood(micro: MicroBatch, counts: Denominators) -> tuple[torch.Tensor, Metrics]:
    loss = aggregate(-micro.outputs, micro.mask, "token-mean", counts)
    return loss, collect({"loss/supervised": (loss, torch.ones(()))})
