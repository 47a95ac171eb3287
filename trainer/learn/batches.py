"""From finished episodes to what the algorithms and the backends read."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.algorithms.batch import TrajectoryBatch
from trainer.learn.rows import Row, RowBuilder
from trainer.records.trajectory import Group, Trajectory


@dataclass(frozen=True, slots=True)
class EpisodeBatch:
    """The episodes of one update and their training rows.

    Attributes:
        trajectories: The episodes, group by group.
        episodes: The same, as the algorithms read them.
        rows: Their training rows.
        mask: True where the policy sampled the token, bool `[rows, tokens]`.
    """

    trajectories: list[Trajectory]
    episodes: TrajectoryBatch
    rows: list[Row]
    mask: Tensor

    @property
    def domains(self) -> list[str]:
        """The domain of each row."""
        return [self.trajectories[row.trajectory].task.domain for row in self.rows]

    def note_advantages(self, advantages: Tensor) -> None:
        """Write into the records with which advantages they are trained.

        Args:
            advantages: Of every row's tokens, `[rows, tokens]`.
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
        mask=padded([[float(flag) for flag in row.mask] for row in rows]) > 0.5,
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
    )


def padded(rows: Sequence[Sequence[float]]) -> Tensor:
    """Return ragged rows as float32 `[rows, longest]`, zeros behind the end of each."""
    width = max((len(row) for row in rows), default=0)
    table = torch.zeros(len(rows), width)
    for place, row in enumerate(rows):
        table[place, : len(row)] = torch.tensor(row, dtype=torch.float32)
    return table


def padded_tensors(rows: Sequence[Tensor]) -> Tensor:
    """Return ragged tensors as float32 `[rows, longest]`, zeros behind the end of each."""
    return (
        torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True).float() if rows else torch.zeros(0, 0)
    )
