"""Training rows from records: a row per segment, or a row per turn. Two builders over one record."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollgym.trainer.backends.base import TrainRow
from rollgym.trainer.records.images import PlacedImage, images_until
from rollgym.trainer.records.trajectory import Trajectory


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
        sequence: Names what the row is a part of where a loss averages over sequences: with a row per segment the
            whole trajectory, however often its history was edited; with a row per turn the turn.
        images: Pictures that the policy was shown, and the tokens that stand for them.
        experts: Experts that tokens took when they were drawn, of the first of them; None where no server told.
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
        return torch.tensor(self.behaviour_logprobs, dtype=torch.float32)

    def tensors(self, *, experts: bool = False) -> TrainRow:
        """Return what a backend computes on.

        Args:
            experts: Whether tokens are to take the experts that they took when they were drawn, where a server told.
        """
        taken = self.experts if experts else None
        return TrainRow(
            torch.tensor(self.ids),
            torch.tensor(self.mask),
            experts=None if taken is None else torch.from_numpy(taken[: len(self.ids)].copy()),
            images=tuple(self.images),
        )


RowBuilder = Callable[[int, Trajectory], list[Row]]


def trajectory_rows(index: int, trajectory: Trajectory) -> list[Row]:
    """Return one row per segment: one in all where the episode's prompts continued one another."""
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
