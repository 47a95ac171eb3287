"""Supervised learning on records: every reply becomes more likely, token by token."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from trainer.algorithms.aggregation import Denominators, aggregate
from trainer.algorithms.metrics import Metrics, collect
from trainer.backends.base import MicroBatch, TrainBackend, TrainRow
from trainer.backends.skipping import SkippedSteps
from trainer.core.seeding import generator
from trainer.learn.rows import trajectory_rows
from trainer.records.trajectory import Trajectory


def supervised_rows(trajectories: Sequence[Trajectory]) -> list[TrainRow]:
    """Return the training rows of episodes whose replies are to be imitated."""
    rows = [
        row for index, trajectory in enumerate(trajectories) for row in trajectory_rows(index, trajectory)
    ]
    return [TrainRow(torch.tensor(row.ids), torch.tensor(row.mask)) for row in rows]


@dataclass(frozen=True, slots=True)
class Progress:
    """How far supervised learning has come.

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
) -> Iterator[Progress]:
    """Minimise the mean negative log-likelihood of the replies' tokens.

    The work is done as the iterator is asked for more.

    Args:
        backend: The policy.
        rows: What to imitate.
        epochs: Passes over all rows.
        batch_rows: Rows of one optimizer step.
        seed: The run's seed; the order of rows is drawn from a stream below it.
        max_skipped_steps: Steps in a row that may be left out because loss or gradient is not finite.

    Yields:
        Where it stands, after every batch.

    Raises:
        RunError: If more steps than that are left out.
    """
    skipped = SkippedSteps("warm start", max_skipped_steps)
    starts = range(0, len(rows), batch_rows)
    batches = 0
    for epoch in range(epochs):
        order = generator(seed, "supervised", epoch).permutation(len(rows)).tolist()
        losses = []
        for start in starts:
            chosen = [rows[place] for place in order[start : start + batch_rows]]
            counts = Denominators.from_lengths(int(row.mask.sum()) for row in chosen)
            taken = backend.step(chosen, partial(_negative_log_likelihood, counts=counts))
            skipped.note(applied=taken.applied)
            if taken.applied:
                losses.append(taken.metrics["loss/supervised"][0])
            batches += 1
            ended = epoch if start == starts[-1] else None
            yield Progress(
                batches, epochs * len(starts), ended, sum(losses) / len(losses) if losses else math.nan
            )


def _negative_log_likelihood(micro: MicroBatch, counts: Denominators) -> tuple[torch.Tensor, Metrics]:
    loss = aggregate(-micro.outputs, micro.mask, "token-mean", counts)
    return loss, collect({"loss/supervised": (loss, torch.ones(()))})
