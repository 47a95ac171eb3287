"""Supervised learning on records: every reply becomes more likely, token by token."""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch

from trainer.algorithms.aggregation import Denominators, aggregate
from trainer.algorithms.metrics import Metrics, collect
from trainer.backends.base import MicroBatch, TrainBackend, TrainRow
from trainer.backends.skipping import SkippedSteps
from trainer.records import Trajectory
from trainer.rows import trajectory_rows
from trainer.seeding import generator


def supervised_rows(trajectories: Sequence[Trajectory]) -> list[TrainRow]:
    """Return the training rows of episodes whose replies are to be imitated."""
    rows = [
        row for index, trajectory in enumerate(trajectories) for row in trajectory_rows(index, trajectory)
    ]
    return [TrainRow(torch.tensor(row.ids), torch.tensor(row.mask)) for row in rows]


def train_supervised(
    backend: TrainBackend,
    rows: Sequence[TrainRow],
    *,
    epochs: int,
    batch_rows: int,
    seed: int,
    max_skipped_steps: int,
    report: Callable[[int, float], None],
) -> None:
    """Minimise the mean negative log-likelihood of the replies' tokens.

    Args:
        backend: The policy.
        rows: What to imitate.
        epochs: Passes over all rows.
        batch_rows: Rows of one optimizer step.
        seed: The run's seed; the order of rows is drawn from a stream below it.
        max_skipped_steps: Steps in a row that may be left out because loss or gradient is not finite.
        report: Told the epoch and its mean loss.

    Raises:
        RunError: If more than that are.
    """
    skipped = SkippedSteps("warm start", max_skipped_steps)
    for epoch in range(epochs):
        order = generator(seed, "supervised", epoch).permutation(len(rows)).tolist()
        losses = []
        for start in range(0, len(order), batch_rows):
            chosen = [rows[place] for place in order[start : start + batch_rows]]
            counts = Denominators.from_lengths(int(row.mask.sum()) for row in chosen)
            taken = backend.step(chosen, partial(_negative_log_likelihood, counts=counts))
            skipped.note(applied=taken.applied)
            if taken.applied:
                losses.append(taken.metrics["loss/supervised"][0])
        report(epoch, sum(losses) / len(losses) if losses else math.nan)


def _negative_log_likelihood(micro: MicroBatch, counts: Denominators) -> tuple[torch.Tensor, Metrics]:
    loss = aggregate(-micro.outputs, micro.mask, "token-mean", counts)
    return loss, collect({"loss/supervised": (loss, torch.ones(()))})
