"""Maze-v0: find the way through a maze that is drawn, or described by coordinates."""

from collections.abc import Mapping
from typing import Annotated, Any, Unpack

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from rollgym.envs.core.grid import GridGame
from rollgym.envs.core.kwargs import OneOf
from rollgym.envs.core.splits import SPLIT, Split, checked_split
from rollgym.envs.core.text_game import GameKwargs, Move, Refusal, StepLimit
from rollgym.envs.games.maze_maps import Cell, Maze, draw_maze, example_maze, longest_way

ACTIONS = ("Up", "Down", "Left", "Right")
_SHOWN = ("map", "coordinates", "both")
_COLOURS = {"#": (70, 70, 80), " ": (235, 235, 225), "G": (244, 201, 93), "P": (60, 120, 200)}


class MazeEnv(GridGame):
    """Cells with walls between them.

    Raises:
        ValueError: If an argument makes no sense.
    """

    RENDERED_CELL = 12

    metadata: dict[str, Any] = GridGame.metadata | {
        "reset_options": ["expert", "split"],
        "description": "Find the way through a maze.",
        "observation": "The maze as a map, or your cell, the goal and the open ways, as `show` says.",
        "actions": "`Up`, `Down`, `Left` or `Right`.",
        "reward": "1 at the goal, else 0.",
        "max_episode_steps": 100,
    }

    def __init__(
        self,
        *,
        size: Annotated[int, Field(ge=2, le=20, description="Rows and columns of cells.")] = 5,
        loops: Annotated[
            float,
            Field(
                ge=0,
                le=1,
                description=(
                    "Share of the walls that are broken through, so that there are several ways; 0 for "
                    "exactly one."
                ),
            ),
        ] = 0.0,
        min_path: Annotated[int, Field(ge=1, description="Shortest way from start to goal, at least.")] = 3,
        max_path: Annotated[int | None, Field(ge=1, description="And at most.")] = None,
        show: Annotated[
            str,
            OneOf(*_SHOWN),
            Field(
                description="What the policy sees: the `map`, `coordinates` with the open ways, or `both`."
            ),
        ] = "map",
        split: Annotated[
            str | None, SPLIT, Field(description="Only mazes of this split, by content.")
        ] = None,
        max_episode_steps: StepLimit = 100,
        **common: Unpack[GameKwargs],
    ) -> None:
        super().__init__(ACTIONS, max_episode_steps=max_episode_steps, **common)
        if not min_path < size * size or (max_path is not None and max_path < min_path):
            raise ValueError(
                f"1 <= min_path <= max_path is needed, and a way on the maze, not {min_path} and {max_path}"
            )
        if min_path > (most := longest_way(size, loops)):
            raise ValueError(
                f"mazes of size {size} with loops {loops} have ways of at most {most} steps: loosen min_path "
                f"{min_path}, or take fewer loops"
            )
        self._size = size
        self._difficulty: dict[str, Any] = {"loops": loops, "min_path": min_path, "max_path": max_path}
        self._show = show
        self._split = checked_split(split)
        if self._example(self._split) is None:
            raise ValueError(
                f"no maze of size {size} with a way of {min_path} to {max_path} steps and split {split} was found: "
                "loosen min_path or max_path, or take fewer loops"
            )
        self._take(Maze(2, frozenset({frozenset({(0, 0), (0, 1)})}), (0, 0), (0, 1)))

    def start_episode(self, options: Mapping[str, Any]) -> None:
        split = checked_split(options.get("split", self._split))
        maze = draw_maze(self.np_random, self._size, split=split, **self._difficulty) or self._example(split)
        if maze is None:
            raise ValueError(f"no maze of split {split} was found: loosen min_path or max_path")
        self._take(maze)

    def _example(self, split: Split | None) -> Maze | None:
        return example_maze(self._size, split=split, **self._difficulty)

    def _take(self, maze: Maze) -> None:
        self._maze = maze
        self._cell: Cell = maze.start
        self._distances = maze.distances()
        self._walls = maze.drawn()

    def parse_action(self, text: str) -> int | Refusal:
        action = super().parse_action(text)
        if isinstance(action, int) and self._maze.moved(self._cell, action) is None:
            return Refusal(f"There is a wall on the way {ACTIONS[action].lower()}.")
        return action

    def apply_action(self, action: int) -> Move:
        reached = self._maze.moved(self._cell, action)
        assert reached is not None
        self._cell = reached
        solved = reached == self._maze.goal
        return Move(float(solved), solved, solved)

    def draw_board(self) -> str:
        parts = []
        if self._show != "coordinates":
            parts.append("\n".join(self._rows()))
        if self._show != "map":
            ways = ", ".join(self.available_actions())
            parts.append(f"You: {_place(self._cell)}\nGoal: {_place(self._maze.goal)}\nOpen ways: {ways}")
        return "\n\n".join(parts)

    def _rows(self) -> list[str]:
        rows = list(self._walls)
        for (row, column), symbol in ((self._maze.goal, "G"), (self._cell, "P")):
            line = rows[2 * row + 1]
            rows[2 * row + 1] = f"{line[: 2 * column + 1]}{symbol}{line[2 * column + 2 :]}"
        return rows

    def state_info(self) -> dict[str, Any]:
        # Within one task the maze is the same, so the cell says all of the state.
        return {
            "anchor": f"{self._cell[0]} {self._cell[1]}",
            "state": {"position": list(self._cell), "goal": list(self._maze.goal), "rows": list(self._walls)},
        }

    def available_actions(self) -> list[str]:
        return [
            name for action, name in enumerate(ACTIONS) if self._maze.moved(self._cell, action) is not None
        ]

    def describe_rules(self) -> str:
        shown = {
            "map": "It is drawn row by row: # is wall, P is you, G is the goal; each action takes you two places on, "
            "to the next cell, if there is no wall between.",
            "coordinates": "You are told the row and the column of your cell and of the goal, counted from 0 at the "
            "top left, and the ways that are open.",
        }
        told = " ".join(text for name, text in shown.items() if self._show in (name, "both"))
        return f"You walk through a maze of {self._size} rows and {self._size} columns of cells. Reach the goal. {told}"

    def optimal_steps(self) -> int:
        return self._distances[self._cell]

    def expert_action(self) -> int:
        reached = [(self._maze.moved(self._cell, action), action) for action in range(len(ACTIONS))]
        return min((self._distances[cell], action) for cell, action in reached if cell is not None)[1]

    def draw_picture(self, cell: int) -> NDArray[np.uint8]:
        rows = [[_COLOURS[symbol] for symbol in row] for row in self._rows()]
        return np.asarray(rows, dtype=np.uint8).repeat(cell, axis=0).repeat(cell, axis=1)


def _place(cell: Cell) -> str:
    return f"row {cell[0]}, column {cell[1]}"
