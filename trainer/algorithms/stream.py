"""The sampled tokens of each trajectory as one sequence, across all rows."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rollgym.trainer.algorithms.batch import RowBatch


@dataclass(frozen=True, slots=True)
class TokenStream:
    """Sampled tokens in the order in which they were sampled: observations left out, rows put end to end.

    A trajectory that was cut into a row per turn is here the same stream as in a single row, so that GAE runs over
    all its turns. Tensors have one entry per sampled token of the batch.

    Attributes:
        row: Row of the token.
        column: Index of the token in its row.
        trajectory: Trajectory of the token.
        turn: Turn of the token.
        position: Index of the token in its trajectory.
        turn_end: Whether the token is the last of its turn.
        shape: Number of trajectories and the most tokens that one of them has.
    """

    row: Tensor
    column: Tensor
    trajectory: Tensor
    turn: Tensor
    position: Tensor
    turn_end: Tensor
    shape: tuple[int, int]

    @classmethod
    def from_rows(cls, rows: RowBatch, trajectories: int) -> "TokenStream":
        """Order the sampled tokens of a batch of rows.

        Raises:
            ValueError: If a turn lies in more than one row: no order of its tokens is known.
        """
        return cls.ordered(rows.trajectory, rows.mask, rows.turn_index, trajectories)

    @classmethod
    def ordered(cls, episode: Tensor, mask: Tensor, turn_index: Tensor, trajectories: int) -> "TokenStream":
        """Order the sampled tokens of rows of which episode `[rows]`, mask and turns `[rows, tokens]` are known.

        Raises:
            ValueError: If a turn lies in more than one row: no order of its tokens is known.
        """
        row, column = mask.nonzero(as_tuple=True)
        trajectory, turn = episode[row], turn_index[row, column]
        turns = int(turn.max()) + 1 if len(turn) else 1
        key = trajectory * turns + turn
        order = torch.argsort(key * mask.shape[1] + column, stable=True)
        row, column, trajectory, turn, key = (part[order] for part in (row, column, trajectory, turn, key))
        same_turn = key[1:] == key[:-1]
        if bool((same_turn & (row[1:] != row[:-1])).any()):
            raise ValueError("the sampled tokens of a turn must lie in one row")
        turn_end = torch.ones_like(key, dtype=torch.bool)
        turn_end[:-1] = ~same_turn
        count = torch.bincount(trajectory, minlength=trajectories)
        first = count.cumsum(0) - count
        position = torch.arange(len(key), device=key.device) - first[trajectory]
        longest = int(count.max()) if trajectories else 0
        return cls(row, column, trajectory, turn, position, turn_end, (trajectories, longest))

    def gather(self, values: Tensor) -> Tensor:
        """Return `[rows, tokens]` values as `[trajectories, longest]`, in float64, zeros behind the last token."""
        dense = torch.zeros(self.shape, dtype=torch.float64, device=values.device)
        dense[self.trajectory, self.position] = values[self.row, self.column].double()
        return dense

    def scatter(self, dense: Tensor, like: Tensor) -> Tensor:
        """Return `[trajectories, longest]` values as `[rows, tokens]` of the shape of `like`, zeros elsewhere."""
        values = torch.zeros(like.shape, dtype=dense.dtype, device=dense.device)
        values[self.row, self.column] = dense[self.trajectory, self.position]
        return values

    def flags(self, values: Tensor) -> Tensor:
        """Return a flag per token as bool `[trajectories, longest]`, False behind the last token."""
        dense = torch.zeros(self.shape, dtype=torch.bool, device=values.device)
        dense[self.trajectory, self.position] = values
        return dense

    def sampled(self) -> Tensor:
        """Return which of `[trajectories, longest]` are tokens, and not what is behind the last one."""
        return self.flags(torch.ones_like(self.turn_end))
