"""From finished episodes to what the algorithms and the backends read."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from rollgym.trainer.algorithms.batch import TrajectoryBatch
from rollgym.trainer.backends.batching import pad_rows
from rollgym.trainer.learn.rows import Row, RowBuilder
from rollgym.trainer.records.group import Group
from rollgym.trainer.records.trajectory import Outcome, Trajectory
from rollgym.trainer.tasks.task import Task


@dataclass(frozen=True, slots=True)
class EpisodeBatch:
    """The episodes of one update and their training rows.

    Attributes:
        trajectories: The episodes, group by group.
        episodes: The same, as the algorithms read them.
        rows: Their training rows.
        mask: True where the policy sampled the token, bool `[rows, tokens]`.
        chosen: Indices of the groups that the update has chosen rows of. It is the update that notes them, and those
            below; parts of the batch share them with it.
        trained: Indices of the groups with rows in an optimizer step that was taken.
    """

    trajectories: list[Trajectory]
    episodes: TrajectoryBatch
    rows: list[Row]
    mask: Tensor
    chosen: set[int] = field(default_factory=set)
    trained: set[int] = field(default_factory=set)

    @property
    def domains(self) -> list[str]:
        """Return the domain of each row's task."""
        return [self.trajectories[row.trajectory].task.domain for row in self.rows]

    def only(self, kept: Sequence[bool]) -> Self:
        """Return the batch of some of its episodes, by a flag for each, as if the others had not been played."""
        indices = [index for index, flag in enumerate(kept) if flag]
        number = {index: at for at, index in enumerate(indices)}
        rows = [at for at, row in enumerate(self.rows) if kept[row.trajectory]]
        longest = max((len(self.rows[at].ids) for at in rows), default=0)
        return replace(
            self,
            trajectories=[self.trajectories[index] for index in indices],
            episodes=self.episodes.select(indices),
            rows=[_renumbered(self.rows[at], number[self.rows[at].trajectory]) for at in rows],
            mask=self.mask[rows, :longest],
        )

    def rows_at(self, indices: Sequence[int]) -> Self:
        """Return the batch with some of its rows alone; the episodes stay."""
        return replace(self, rows=[self.rows[index] for index in indices], mask=self.mask[list(indices)])

    def groups_of(self, indices: Iterable[int]) -> set[int]:
        """Return the indices of the groups that some of the rows are of."""
        return {self.episodes.groups[self.rows[index].trajectory] for index in indices}

    def note_advantages(self, advantages: Tensor) -> None:
        """Write into the records with which advantages they are trained.

        Args:
            advantages: Advantages of every row's tokens, `[rows, tokens]`.
        """
        for row, values in zip(self.rows, advantages.tolist(), strict=True):
            for turn in self.trajectories[row.trajectory].turns:
                if turn.segment == row.segment and turn.end > turn.start and row.has_reply(turn.start):
                    turn.advantages = values[turn.start : turn.end]


def episode_batch(groups: Sequence[Group], build_rows: RowBuilder) -> EpisodeBatch:
    """Return the batch of all episodes of `groups`."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    rows = [row for index, trajectory in enumerate(trajectories) for row in build_rows(index, trajectory)]
    return EpisodeBatch(
        trajectories=trajectories,
        episodes=turns_of(groups),
        rows=rows,
        mask=pad_rows([torch.tensor(row.mask) for row in rows]).bool(),
    )


def turns_of(groups: Sequence[Group]) -> TrajectoryBatch:
    """Return the turns of all episodes of `groups` as the algorithms read them."""
    pairs = [(group.index, trajectory) for group in groups for trajectory in group.trajectories]
    turns = [trajectory.turns for _, trajectory in pairs]
    return TrajectoryBatch(
        groups=[index for index, _ in pairs],
        rewards=[[turn.reward for turn in episode] for episode in turns],
        format_penalties=[[turn.format_penalty for turn in episode] for episode in turns],
        valid=[[turn.action_is_valid for turn in episode] for episode in turns],
        anchors=[[turn.anchor for turn in episode] for episode in turns],
        tokens=[[turn.end - turn.start for turn in episode] for episode in turns],
        solved=[trajectory.success for _, trajectory in pairs],
        truncated=[_was_cut_off(trajectory) for _, trajectory in pairs],
        parts=[[turn.reward_parts for turn in episode] for episode in turns],
        tasks=[key for group in groups for key in [task_key(group.task)] * len(group.trajectories)],
        domains=[trajectory.task.domain for _, trajectory in pairs],
        greedy=_greedy_of(groups),
    )


def task_key(task: Task) -> str:
    """Return a key that is equal for equal tasks, wherever in the stream they are."""
    named = json.dumps([task.env_id, dict(task.kwargs), task.seed, task.options], sort_keys=True, default=str)
    return hashlib.blake2b(named.encode(), digest_size=12).hexdigest()


def _greedy_of(groups: Sequence[Group]) -> TrajectoryBatch | None:
    """Return the greedy episodes that were played beside groups."""
    played = [
        Group(group.index, group.task, group.admitted_version, [group.greedy])
        for group in groups
        if group.greedy is not None
    ]
    return turns_of(played) if played else None


def _was_cut_off(trajectory: Trajectory) -> bool:
    """Whether an episode, or its last reply, ended at a limit."""
    cut = trajectory.outcome in (Outcome.TRUNCATED, Outcome.CONTEXT_OVERFLOW)
    return cut or (bool(trajectory.turns) and trajectory.turns[-1].finish_reason == "length")


def _renumbered(row: Row, trajectory: int) -> Row:
    return replace(row, trajectory=trajectory, sequence=(trajectory, row.sequence[1]))
