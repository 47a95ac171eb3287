"""One update of a student on its own episodes: the distribution at each token moves towards the teacher's."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from rollgym.trainer.algorithms.aggregation import Denominators, Metrics, aggregate, collect, means
from rollgym.trainer.algorithms.distillation import sampled_reverse_kl
from rollgym.trainer.backends.base import MicroBatch, StepReport, TrainBackend, TrainRow
from rollgym.trainer.backends.distillation_head import TEACHER_FIELD
from rollgym.trainer.backends.skipping import SkippedSteps
from rollgym.trainer.learn.batches import EpisodeBatch
from rollgym.trainer.learn.hindsight import Hindsight, scores_in_place
from rollgym.trainer.learn.token_fields import TaughtFields


class Teacher(Protocol):
    """Scores the student's tokens with a teacher's log-probabilities."""

    async def logprobs(self, rows: Sequence[TrainRow]) -> list[Tensor]:
        """Return the log-probabilities of the marked tokens of rows, `[tokens]` each, zero elsewhere."""
        ...


class RowSource(Protocol):
    """Builds training rows from a batch of episodes, with all fields that the loss reads."""

    async def rows(self, batch: EpisodeBatch) -> list[TrainRow]:
        """Return a row for each of the batch's, in their order; of those without a marked token nothing is learnt."""
        ...


class ComputedRows:
    """Rows for a head that computes the teachers beside the student.

    Args:
        teacher_of: Gives the number of a domain's teacher.
    """

    def __init__(self, teacher_of: Callable[[str], int]) -> None:
        self._teacher_of = teacher_of

    async def rows(self, batch: EpisodeBatch) -> list[TrainRow]:
        """Return the rows, each with the number of its teacher."""
        return [
            with_teacher(row.tensors(), self._teacher_of(domain))
            for row, domain in zip(batch.rows, batch.domains, strict=True)
        ]


class ScoredRows:
    """Rows whose tokens teachers have scored.

    Args:
        teachers: The teachers.
        teacher_of: Gives the number of a domain's teacher.
    """

    def __init__(self, teachers: Sequence[Teacher], teacher_of: Callable[[str], int]) -> None:
        self._teachers = teachers
        self._teacher_of = teacher_of

    async def rows(self, batch: EpisodeBatch) -> list[TrainRow]:
        """Return the rows with their teachers' log-probabilities."""
        rows = [row.tensors() for row in batch.rows]
        which = [self._teacher_of(domain) for domain in batch.domains]
        taught: list[Tensor] = [torch.empty(0)] * len(rows)
        for number, teacher in enumerate(self._teachers):
            indices = [index for index, each in enumerate(which) if each == number]
            if indices:
                for index, scores in zip(
                    indices, await teacher.logprobs([rows[index] for index in indices]), strict=True
                ):
                    taught[index] = scores
        return [
            tensors.with_fields(
                TaughtFields(behaviour_logprobs=row.behaviour(), taught_logprobs=scores.float()).named()
            )
            for row, tensors, scores in zip(batch.rows, rows, taught, strict=True)
        ]


class HindsightRows:
    """Scores rows with the student itself, which sees their feedback: the self-distillation teacher.

    Args:
        student: The policy with its present weights.
        hindsight: Writes the feedback into prompts.
    """

    def __init__(self, student: TrainBackend, hindsight: Hindsight) -> None:
        self._student = student
        self._hindsight = hindsight

    async def rows(self, batch: EpisodeBatch) -> list[TrainRow]:
        """Return the rows, with only the replies marked that have feedback."""
        told = self._hindsight.rows(batch)
        scores = await asyncio.to_thread(self._student.forward, [each.row for each in told]) if told else []
        return scores_in_place(told, scores, batch.rows)


class DistillationLearner:
    """Updates a student on batches of its own episodes, one optimizer step each.

    Args:
        student: The policy. Its head computes log-probabilities if `sampled`, else losses of tokens.
        source: Makes rows of episodes.
        sampled: Whether the loss is the estimate by the sampled tokens.
        largest_ratio: Bound of the weight of tokens that an older student sampled.
        max_skipped_steps: Steps in a row that may be skipped because loss or gradient is not finite.
        say: Receives messages for people about skipped steps.
    """

    def __init__(
        self,
        student: TrainBackend,
        source: RowSource,
        *,
        sampled: bool,
        largest_ratio: float,
        max_skipped_steps: int,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._student = student
        self._source = source
        self._sampled = sampled
        self._largest_ratio = largest_ratio
        self._skipped = SkippedSteps("student", max_skipped_steps, say)

    async def update(self, batch: EpisodeBatch, step: int, version: int | None = None) -> dict[str, float]:
        """Take the optimizer step of one batch and return its metrics, without blocking the event loop.

        Args:
            batch: Episodes and their rows.
            step: Training step; nothing is drawn at random here.
            version: The policy version that is trained; what older ones sampled is weighed by its log-probabilities.

        Raises:
            RunError: If too many steps in a row were skipped.
        """
        made = await self._source.rows(batch)
        indices = [index for index, row in enumerate(made) if bool(row.mask.any())]
        if not indices:
            return {"batch/rows": 0.0}
        batch.chosen.update(batch.groups_of(indices))
        rows = [made[index] for index in indices]
        counts = Denominators.from_lengths(int(row.mask.sum()) for row in rows)
        loss = partial(mean_loss, counts=counts)
        if self._sampled:
            loss = partial(_sampled_loss, counts=counts, largest_ratio=self._largest_ratio)
        rate = self._student.learning_rate
        taken = await asyncio.to_thread(self._student.step, rows, loss, entropy="metric")
        self._skipped.note(applied=taken.applied, why=taken.broken)
        if taken.applied:
            batch.trained.update(batch.groups_of(indices))
        metrics = _report(taken) | {"batch/rows": float(len(rows)), "distill/tokens": float(counts.tokens)}
        return metrics | {"policy/learning_rate": rate}


def with_teacher(row: TrainRow, number: int) -> TrainRow:
    """Return a row that says which teacher it is learnt from."""
    which = torch.full((len(row.ids),), number)
    return row.with_fields({TEACHER_FIELD: which})


def mean_loss(micro: MicroBatch, counts: Denominators) -> tuple[Tensor, Metrics]:
    """Return a micro-batch's share of the mean over tokens of what a head gave as their losses."""
    loss = aggregate(micro.outputs, micro.mask, "token-mean", counts)
    return loss, _metrics(micro, {"distill/loss": (micro.outputs[micro.mask].sum(), micro.mask.sum())})


def _sampled_loss(micro: MicroBatch, counts: Denominators, largest_ratio: float) -> tuple[Tensor, Metrics]:
    fields = TaughtFields.of(micro.fields)
    taught, behaviour = fields.taught_logprobs, fields.behaviour_logprobs
    losses = sampled_reverse_kl(micro.outputs, behaviour, taught, micro.mask, largest_ratio)
    difference = (micro.outputs - taught)[micro.mask]
    metrics = {"distill/reverse_kl": (difference.sum(), micro.mask.sum())}
    return aggregate(losses, micro.mask, "token-mean", counts), _metrics(micro, metrics)


def _metrics(micro: MicroBatch, parts: dict[str, tuple[Tensor, Tensor]]) -> Metrics:
    if micro.entropy is not None:
        parts = parts | {"policy/entropy": (micro.entropy[micro.mask].sum(), micro.mask.sum())}
    return collect(parts)


def _report(taken: StepReport) -> dict[str, float]:
    numbers = means(taken.metrics) | {
        "policy/optimizer_steps": float(taken.applied),
        "policy/skipped_steps": float(not taken.applied),
    }
    return numbers | ({"policy/gradient_norm": taken.gradient_norm} if taken.applied else {})
