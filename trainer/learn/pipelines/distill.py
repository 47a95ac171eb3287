"""Distillation on examples: at each token the student's distribution moves towards the teacher's."""

from collections.abc import Callable, Sequence
from functools import partial

from rollgym.trainer.algorithms.aggregation import Denominators
from rollgym.trainer.backends.base import TrainBackend, TrainRow
from rollgym.trainer.backends.optimizer import SkippedSteps
from rollgym.trainer.learn.distilling import mean_loss
from rollgym.trainer.learn.pipelines.sft import mean_output, step_metrics


class Distillation:
    """Minimises the mean of what a head gives as the loss of each learnt token.

    Args:
        student: The policy, whose head computes the teachers beside it.
        rows: The training rows.
        held_out: Rows for evaluation only.
        max_skipped_steps: Steps in a row that may be skipped because loss or gradient is not finite.
        say: Receives messages for people about skipped steps.
    """

    def __init__(
        self,
        student: TrainBackend,
        rows: Sequence[TrainRow],
        held_out: Sequence[TrainRow],
        *,
        max_skipped_steps: int,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._student = student
        self._rows = rows
        self._held_out = held_out
        self._skipped = SkippedSteps("student", max_skipped_steps, say)

    def update(self, indices: Sequence[int]) -> dict[str, float]:
        """Take an optimizer step on the rows at some indices, and return its metrics.

        Raises:
            RunError: If too many steps in a row were left out.
        """
        chosen = [self._rows[index] for index in indices]
        counts = Denominators.from_lengths(int(row.mask.sum()) for row in chosen)
        taken = self._student.step(chosen, partial(mean_loss, counts=counts), entropy="metric")
        self._skipped.note(applied=taken.applied, why=taken.broken)
        return step_metrics(taken) | {"distill/tokens": float(counts.tokens)}

    def measure(self) -> dict[str, float]:
        """Return the loss of the held-out rows; empty if there are none."""
        return {"loss": mean_output(self._student, self._held_out)} if self._held_out else {}
