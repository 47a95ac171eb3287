"""From finished episodes to what the algorithms and the backends read: training rows, and batches of them.

A record becomes a row per segment, or a row per turn: two builders over one record.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollgym.trainer.algorithms.batch import TrajectoryBatch
from rollgym.trainer.backends.base import TrainRow
from rollgym.trainer.backends.batching import pad_rows
from rollgym.trainer.records.group import Group
from rollgym.trainer.records.images import PlacedImage, images_until
from rollgym.trainer.records.trajectory import Trajectory, TrajectoryOutcome
from rollgym.trainer.tasks.task import Task


@dataclass(frozen=True, slots=True)
class Row:
    """One token sequence of an episode to train on. All sequences have one entry per token.

    Beside `TrainRow`, which is tensors for any loss, of examples too: this one says of which episode it is, and holds
    the record's own lists, so that a row of a whole segment copies nothing until `tensors` does.

    Attributes:
        trajectory: Index of the trajectory in the batch that the row comes from.
        segment: The segment of the trajectory that it begins with; token i of the one is token i of the other.
        ids: Token ids.
        mask: True where the policy's choice is trained on.
        behaviour_logprobs: Behaviour log-probabilities; 0.0 outside the mask.
        versions: Policy versions; -1 outside the mask.
        turn_index: Turn of the trajectory; -1 outside the mask.
        sequence: Names what the row is a part of, for losses that average over sequences: with a row per segment the
            whole trajectory, however often its history was edited; with a row per turn the turn.
        images: Pictures that the policy was shown, and the tokens that stand for them.
        experts: Experts that the first tokens were routed to when they were drawn; None if no server reported them.
    """

    trajectory: int
    segment: int
    ids: list[int]
    mask: list[bool]
    behaviour_logprobs: list[float]
    versions: list[int]
    turn_index: list[int]
    sequence: tuple[int, int]
    images: Sequence[PlacedImage] = ()
    experts: NDArray[np.int16] | None = field(default=None, compare=False, repr=False)

    def has_reply(self, start: int) -> bool:
        """Whether the row trains on the reply whose first token is at `start`."""
        return start < len(self.mask) and self.mask[start]

    def behaviour(self) -> Tensor:
        """Return the log-probabilities as the tokens were sampled, float32 `[tokens]`."""
        return _tensor(self.behaviour_logprobs, np.float32)

    def turns(self) -> Tensor:
        """Return the turn of the trajectory that each token is of, int64 `[tokens]`; -1 outside the mask."""
        return _tensor(self.turn_index, np.int64)

    def sampled_by(self) -> Tensor:
        """Return the policy version that sampled each token, int64 `[tokens]`; -1 outside the mask."""
        return _tensor(self.versions, np.int64)

    def tensors(self, *, experts: bool = False) -> TrainRow:
        """Return what a backend computes on.

        Args:
            experts: Whether to replay the experts that a server reported for the drawn tokens.
        """
        taken = self.experts if experts else None
        return TrainRow(
            _tensor(self.ids, np.int64),
            _tensor(self.mask, np.bool_),
            experts=None if taken is None else torch.from_numpy(taken[: len(self.ids)].copy()),
            images=tuple(self.images),
        )


def _tensor(numbers: Sequence[float], kind: type[np.generic]) -> Tensor:
    """Return a tensor of a list; numpy reads a list several times as fast as torch does."""
    return torch.from_numpy(np.array(numbers, dtype=kind))


RowBuilder = Callable[[int, Trajectory], list[Row]]


def trajectory_rows(index: int, trajectory: Trajectory) -> list[Row]:
    """Return one row per segment: a single one if the episode's prompts continued one another."""
    return [
        Row(
            trajectory=index,
            segment=number,
            ids=segment.ids,
            mask=segment.action_mask,
            behaviour_logprobs=segment.behaviour_logprobs,
            versions=segment.versions,
            turn_index=segment.turn_index,
            sequence=(index, 0),
            images=segment.images,
            experts=segment.experts,
        )
        for number, segment in enumerate(trajectory.segments)
        if any(segment.action_mask)
    ]


def step_rows(index: int, trajectory: Trajectory) -> list[Row]:
    """Return one row per turn: all that the policy read at that turn, and only that turn's reply to train on."""
    rows = []
    for number, turn in enumerate(trajectory.turns):
        if turn.end == turn.start:
            continue
        segment = trajectory.segments[turn.segment]
        before, reply = turn.start, turn.end - turn.start
        rows.append(
            Row(
                trajectory=index,
                segment=turn.segment,
                ids=segment.ids[: turn.end],
                mask=[False] * before + [True] * reply,
                behaviour_logprobs=[0.0] * before + segment.behaviour_logprobs[turn.start : turn.end],
                versions=[-1] * before + segment.versions[turn.start : turn.end],
                turn_index=[-1] * before + [number] * reply,
                sequence=(index, number),
                images=images_until(segment.images, turn.end),
                experts=None if segment.experts is None else segment.experts[: turn.end],
            )
        )
    return rows


def row_builder(name: str) -> RowBuilder:
    """Return the builder that the setting `rows` names."""
    return {"trajectory": trajectory_rows, "step": step_rows}[name]


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
        mask=pad_rows([_tensor(row.mask, np.bool_) for row in rows]).bool(),
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
    cut = trajectory.outcome in (TrajectoryOutcome.TRUNCATED, TrajectoryOutcome.CONTEXT_OVERFLOW)
    return cut or (bool(trajectory.turns) and trajectory.turns[-1].finish_reason == "length")


def _renumbered(row: Row, trajectory: int) -> Row:
    return replace(row, trajectory=trajectory, sequence=(trajectory, row.sequence[1]))
