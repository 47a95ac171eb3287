"""Feedback for self-distillation: rows that show, before a reply, how the reply turned out."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from rollgym.trainer.backends.base import TrainRow
from rollgym.trainer.config.distillation import FeedbackSettings
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.learn.batches import EpisodeBatch
from rollgym.trainer.learn.rows import Row
from rollgym.trainer.learn.token_fields import TaughtFields
from rollgym.trainer.records.trajectory import Trajectory, Turn
from rollgym.trainer.rollout.rendering import ChatRenderer

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


def scores_in_place(
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
