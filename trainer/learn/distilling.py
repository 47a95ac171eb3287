"""One update of a student on its own episodes: the distribution at each token moves towards the teacher's.

In self-distillation the teacher is the policy itself, with rows that show, before a reply, how the reply turned out.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from rollgym.trainer.algorithms.aggregation import Denominators, Metrics, aggregate, collect, means
from rollgym.trainer.algorithms.distillation import sampled_reverse_kl
from rollgym.trainer.backends.base import MicroBatch, StepReport, TrainBackend, TrainRow
from rollgym.trainer.backends.distillation_head import TEACHER_FIELD
from rollgym.trainer.backends.optimizer import SkippedSteps
from rollgym.trainer.config.supervised import FeedbackSettings
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.learn.batches import EpisodeBatch, Row
from rollgym.trainer.learn.token_fields import TaughtFields
from rollgym.trainer.records.trajectory import Trajectory, Turn
from rollgym.trainer.rollout.prompts import ChatRenderer

_QUESTION = {"role": "user", "content": "x"}


@dataclass(frozen=True, slots=True)
class HindsightRow:
    """A row that shows a reply after its feedback.

    Attributes:
        row: The teacher's input; the reply's tokens are marked.
        source: Index of the batch's row that contains the reply.
        start: Position of the reply's first token in that row.
    """

    row: TrainRow
    source: int
    start: int


class Hindsight:
    """Writes feedback on replies into their prompts, as a further user message.

    Ids of prompts and replies are those of the record: the message is inserted before the opening of the policy's turn.

    Args:
        renderer: The policy's.
        settings: The contents of the feedback.
        longest: Tokens of the longest row.

    Raises:
        ConfigError: If the chat template cannot render a further user message there.
    """

    def __init__(self, renderer: ChatRenderer, settings: FeedbackSettings, longest: int) -> None:
        self._renderer = renderer
        self._settings = settings
        self._longest = longest
        self._opening, self._before, self._behind = self._frame()

    def rows(self, batch: EpisodeBatch) -> list[HindsightRow]:
        """Return a row for every reply of a batch that has feedback and room for it."""
        solutions = _solutions(batch)
        made = []
        for number, row in enumerate(batch.rows):
            trajectory = batch.trajectories[row.trajectory]
            for index, turn in enumerate(trajectory.steps):  # no environment answered a summary
                if turn.segment != row.segment or turn.end <= turn.start or not row.has_reply(turn.start):
                    continue
                hint = self._hint(trajectory, index, solutions.get(batch.episodes.groups[row.trajectory]))
                if hint and (told := self._row(row, turn, hint)) is not None:
                    made.append(HindsightRow(told, number, turn.start))
        return made

    def _hint(self, trajectory: Trajectory, index: int, solution: Trajectory | None) -> str:
        """Return the feedback on a reply; empty if nothing is known."""
        longest = self._settings.longest
        steps = trajectory.steps
        after = steps[index + 1].observation if index + 1 < len(steps) else ""
        feedback = after or trajectory.detail or f"the episode ended: {trajectory.outcome.value}"
        shown = ""
        if self._settings.solution and solution is not None and index < len(solution.steps):
            reply = solution.steps[index].reply
            if solution is not trajectory and reply:
                shown = self._settings.solution.replace("{reply}", reply[:longest])
        return self._settings.text.replace("{feedback}", feedback[:longest]).replace("{solution}", shown)

    def _row(self, row: Row, turn: Turn, hint: str) -> TrainRow | None:
        prompt, reply = row.ids[: turn.start], row.ids[turn.start : turn.end]
        opening = len(self._opening)
        if prompt[-opening:] != self._opening:
            return None  # a prompt that the template did not end, such as an agent's own
        told = self._renderer.ids_of(f"{self._before}{self._renderer.quote(hint)}{self._behind}")
        ids = [*prompt[:-opening], *told, *reply]
        if len(ids) > self._longest:
            return None
        return TrainRow(
            torch.tensor(ids), torch.tensor([False] * (len(ids) - len(reply)) + [True] * len(reply))
        )

    def _frame(self) -> tuple[list[int], str, str]:
        """Return the ids that open the policy's turn, and the text before and after a message in front of them."""
        template = self._renderer.template
        place = template.control.place
        asked = template.text([_QUESTION], generation_prompt=True)
        plain = template.text([_QUESTION], generation_prompt=False)
        told = template.text([_QUESTION, {"role": "user", "content": place}], generation_prompt=True)
        if not asked.startswith(plain) or not told.startswith(plain) or told.count(place) != 1:
            raise ConfigError(
                "distill.feedback: the chat template takes no further message of the user's in front of the reply: set "
                "prompt.chat_template to one that does"
            )
        before, _, behind = told[len(plain) :].partition(place)
        return self._renderer.ids_of(asked[len(plain) :]), before, behind


def _solutions(batch: EpisodeBatch) -> dict[int, Trajectory]:
    """Return an episode of each group that solved its task, the first one of several."""
    found: dict[int, Trajectory] = {}
    for group, trajectory in zip(batch.episodes.groups, batch.trajectories, strict=True):
        if trajectory.success:
            found.setdefault(group, trajectory)
    return found


def _scores_in_place(
    rows: Sequence[HindsightRow], scores: Sequence[torch.Tensor], whole: Sequence[Row]
) -> list[TrainRow]:
    """Return the rows with the teacher's log-probabilities of the replies that it scored; only these are marked."""
    masks = [torch.zeros(len(row.ids), dtype=torch.bool) for row in whole]
    taught = [torch.zeros(len(row.ids)) for row in whole]
    for told, score in zip(rows, scores, strict=True):
        values = score[told.row.mask]
        span = slice(told.start, told.start + len(values))
        masks[told.source][span] = True
        taught[told.source][span] = values
    return [
        replace(row.tensors(), mask=mask).with_fields(
            TaughtFields(behaviour_logprobs=row.behaviour(), taught_logprobs=values).named()
        )
        for row, mask, values in zip(whole, masks, taught, strict=True)
    ]


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
        return _scores_in_place(told, scores, batch.rows)


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
