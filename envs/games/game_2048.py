"""Game2048-v0: slide tiles; equal ones merge, until the target tile is there or nothing moves."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Any, Unpack

from pydantic import Field

from rollgym.envs.core.kwargs import OneOf
from rollgym.envs.core.text_game import GameKwargs, Move, NamedGame, Refusal

ACTIONS = ("Up", "Down", "Left", "Right")
_FOUR_PROBABILITY = 0.1

Grid = tuple[tuple[int, ...], ...]
"""Rows of tiles; 0 is an empty cell."""


class Game2048Env(NamedGame):
    """The rules and points of 2048: a merge pays the tile that it makes.

    Raises:
        ValueError: If an argument makes no sense.
    """

    metadata: dict[str, Any] = NamedGame.metadata | {
        "description": "Slide tiles so that equal ones merge, up to the target tile.",
        "observation": "The grid of tiles.",
        "actions": "The direction in which the tiles slide; only those that move something.",
        "reward": "The tiles that merges make. Success: the target tile is there.",
        "max_episode_steps": 2_000,
        "metrics": {**NamedGame.metadata["metrics"], "largest_tile": "last"},
        "baselines": {
            "random": [0, 1160],
            "constant action": [0, 11.6],
            "echo of the instruction": [0, 0.64],
        },
    }

    def __init__(
        self,
        *,
        size: Annotated[int, Field(ge=2, le=6, description="Rows and columns.")] = 4,
        target: Annotated[
            int,
            OneOf(*[2**power for power in range(3, 18)]),
            Field(description="The tile that ends the game with success; a power of two."),
        ] = 2048,
        max_episode_steps: Annotated[
            int, Field(ge=1, description="Moves, after which the episode is truncated.")
        ] = 2000,
        **common: Unpack[GameKwargs],
    ) -> None:
        super().__init__(ACTIONS, max_episode_steps=max_episode_steps, **common)
        self._target = target
        self._grid: Grid = ((0,) * size,) * size
        self._size = size

    def start_episode(self, options: Mapping[str, Any]) -> None:
        self._grid = ((0,) * self._size,) * self._size
        self._add_tile()
        self._add_tile()

    def parse_action(self, text: str) -> int | Refusal:
        action = super().parse_action(text)
        if isinstance(action, int) and slide(self._grid, action)[0] == self._grid:
            return Refusal(f"No tile can move {ACTIONS[action].lower()}.")
        return action

    def apply_action(self, action: int) -> Move:
        self._grid, points = slide(self._grid, action)
        if self._largest() >= self._target:
            return Move(float(points), True, True)
        self._add_tile()
        return Move(float(points), not self.available_actions(), False)

    def _add_tile(self) -> None:
        empty = [cell for cell, tile in enumerate(sum(self._grid, ())) if tile == 0]
        row, column = divmod(empty[int(self.np_random.integers(len(empty)))], self._size)
        tile = 4 if self.np_random.random() < _FOUR_PROBABILITY else 2
        line = self._grid[row]
        line = (*line[:column], tile, *line[column + 1 :])
        self._grid = (*self._grid[:row], line, *self._grid[row + 1 :])

    def _largest(self) -> int:
        return max(map(max, self._grid))

    def draw_board(self) -> str:
        width = len(str(self._largest()))
        return "\n".join(" ".join(str(tile or ".").rjust(width) for tile in row) for row in self._grid)

    def state_info(self) -> dict[str, Any]:
        rows = [list(row) for row in self._grid]
        return {"anchor": str(rows), "state": {"rows": rows}}

    def episode_metrics(self) -> dict[str, float]:
        return {"largest_tile": self._largest()}

    def available_actions(self) -> list[str]:
        return [name for action, name in enumerate(ACTIONS) if slide(self._grid, action)[0] != self._grid]

    def describe_rules(self) -> str:
        return (
            "You play 2048. A move slides all tiles as far as they go; two equal tiles that meet merge into their sum, "
            "each at most once a move. After each move a new tile, 2 or 4, appears on an empty cell (.). Make the tile "
            f"{self._target}; the game is lost when no tile can move."
        )


def slide(grid: Grid, action: int) -> tuple[Grid, int]:
    """Return the grid after a move, without the new tile, and the points of its merges."""
    lines = list(zip(*grid, strict=True)) if action < 2 else list(grid)
    backwards = action in (1, 3)
    merged = [merge(line[::-1] if backwards else line) for line in lines]
    slid = [line[::-1] if backwards else line for line, _ in merged]
    points = sum(gained for _, gained in merged)
    return tuple(zip(*slid, strict=True)) if action < 2 else tuple(slid), points


@lru_cache(maxsize=1 << 16)
def merge(line: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    """Slide a line to its start. Pairs merge from there on, and what a merge has made does not merge again."""
    tiles = [tile for tile in line if tile]
    merged: list[int] = []
    points = index = 0
    while index < len(tiles):
        tile = tiles[index]
        if tiles[index + 1 : index + 2] == [tile]:
            tile *= 2
            points += tile
            index += 1
        merged.append(tile)
        index += 1
    return (*merged, *(0,) * (len(line) - len(merged))), points
