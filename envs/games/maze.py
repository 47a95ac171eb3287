"""Maze-v0: find the way through a maze that is drawn, or described by coordinates.

Mazes are drawn at random, measured by their shortest way, and wound around a long way on request.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Annotated, Any, Unpack

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from rollgym.envs.core.grid import GridGame
from rollgym.envs.core.kwargs import OneOf
from rollgym.envs.core.splits import Split, TaskSplit, checked_split, split_of_text
from rollgym.envs.core.text_game import GameKwargs, Move, Refusal, StepLimit

WAYS = ((-1, 0), (1, 0), (0, -1), (0, 1))
"""Rows and columns that each action adds: up, down, left, right."""

# Tries, by the cells that they carve: about ten milliseconds, since other sessions in the process wait.
_CELLS = 1_600
_WOUND = 6

Cell = tuple[int, int]
Passage = frozenset[Cell]
"""Two neighbouring cells with no wall between them."""


@dataclass(frozen=True)
class Maze:
    """Rooms in rows and columns, with the passages between them.

    Attributes:
        size: Rows and columns.
        passages: Pairs of neighbours with no wall between them.
        start: The start cell.
        goal: The goal cell.
    """

    size: int
    passages: frozenset[Passage]
    start: Cell
    goal: Cell

    def moved(self, cell: Cell, action: int) -> Cell | None:
        """Return the cell that an action leads to; None for a wall."""
        near = (cell[0] + WAYS[action][0], cell[1] + WAYS[action][1])
        return near if frozenset((cell, near)) in self.passages else None

    def distances(self) -> dict[Cell, int]:
        """Return the length of the shortest way to the goal from each cell that has one."""
        found = {self.goal: 0}
        frontier = deque([self.goal])
        while frontier:
            cell = frontier.popleft()
            for action in range(4):
                near = self.moved(cell, action)
                if near is not None and near not in found:
                    found[near] = found[cell] + 1
                    frontier.append(near)
        return found

    def drawn(self) -> list[str]:
        """Return the maze as rows of `#` and spaces: cells at odd places, walls and passages between them."""
        side = 2 * self.size + 1
        rows = [["#"] * side for _ in range(side)]
        for row in range(self.size):
            for column in range(self.size):
                rows[2 * row + 1][2 * column + 1] = " "
        for (row, column), (other_row, other_column) in map(sorted, self.passages):
            rows[row + other_row + 1][column + other_column + 1] = " "
        return ["".join(row) for row in rows]


def draw_maze(
    generator: np.random.Generator,
    size: int,
    *,
    loops: float,
    min_path: int,
    max_path: int | None,
    split: Split | None,
) -> Maze | None:
    """Draw mazes until one has a shortest way of the wanted length and belongs to the split; or else wind one.

    Long ways are rare in mazes that are drawn at random. After a few tries a way of the wanted length is laid first,
    and the maze around it; of its other walls, those are broken through that make the way no shorter.

    Args:
        generator: Draws.
        size: Rows and columns.
        loops: Share of the walls between cells that are broken through once each cell can be reached.
        min_path: Shortest way from start to goal, at least.
        max_path: And at most; None for no bound.
        split: Only mazes of this split, by content; None for any.

    Returns:
        The maze; None if none turned up soon.
    """
    for _ in range(max(1, _CELLS // size**2)):
        passages = _carved(generator, size, loops)
        start, goal = (
            divmod(cell, size) for cell in generator.choice(size * size, 2, replace=False).tolist()
        )
        maze = Maze(size, passages, start, goal)
        length = maze.distances()[start]
        if not min_path <= length <= (length if max_path is None else max_path):
            continue
        if split is None or _split_of(maze) == split:
            return maze
    most = longest_way(size, loops)
    longest = most if max_path is None else min(most, max_path)
    for _ in range(_WOUND if min_path <= longest else 0):
        # Where walls are to be broken through, the shortest way that will do leaves most of them.
        length = min_path if loops else int(generator.integers(min_path, longest + 1))
        maze = _wound(generator, size, loops, length)
        for form in _turned(maze):
            if split is None or _split_of(form) == split:
                return form
    return None


@lru_cache(maxsize=256)
def _example_maze(
    size: int, loops: float, min_path: int, max_path: int | None, split: Split | None
) -> Maze | None:
    """Return a maze that fits, always the same one; None if the options contradict each other, or nearly do."""
    generator = np.random.default_rng(0)
    return draw_maze(generator, size, loops=loops, min_path=min_path, max_path=max_path, split=split)


def longest_way(size: int, loops: float) -> int:
    """Return the length of the longest shortest way that can be asked for.

    Without loops a way can lead through all cells. Where all walls are broken through, it leads straight from corner to
    corner; between the two the bound is a line.
    """
    return int((1.0 - loops) * (size * size - 1) + loops * 2 * (size - 1))


def _split_of(maze: Maze) -> Split:
    return split_of_text("\n".join([*maze.drawn(), f"{maze.start} {maze.goal}"]))


def _turned(maze: Maze) -> Iterator[Maze]:
    """Yield a maze as it is, turned and mirrored, and each of these from its goal to its start."""
    last = maze.size - 1
    for turn in range(4):
        for mirrored in (False, True):

            def moved(cell: Cell, turn: int = turn, mirrored: bool = mirrored) -> Cell:
                row, column = cell
                for _ in range(turn):
                    row, column = column, last - row
                return (row, last - column) if mirrored else (row, column)

            passages = frozenset(frozenset(map(moved, passage)) for passage in maze.passages)
            start, goal = moved(maze.start), moved(maze.goal)
            yield Maze(maze.size, passages, start, goal)
            yield Maze(maze.size, passages, goal, start)


def _wound(generator: np.random.Generator, size: int, loops: float, length: int) -> Maze:
    """Draw a maze whose shortest way has a length: a part of a walk through all cells, and what is grown on it."""
    walk = _walk_through_all(generator, size)
    first = int(generator.integers(len(walk) - length))
    way = walk[first : first + length + 1]
    steps = {cell: index for index, cell in enumerate(way)}
    passages = {frozenset(pair) for pair in pairwise(way)}
    growing = list(way)
    draws = iter(generator.random((2 * size * size, 2)).tolist())
    while growing:
        which, where = next(draws)
        index = int(which * len(growing))
        cell = growing[index]
        fresh = [near for near in _around(cell, size) if near not in steps]
        if not fresh:
            # Each cell is taken from the list once, and put there once.
            growing[index] = growing[-1]
            growing.pop()
            continue
        near = fresh[int(where * len(fresh))]
        passages.add(frozenset((cell, near)))
        steps[near] = steps[cell] + 1
        growing.append(near)
    cells = [divmod(cell, size) for cell in range(size * size)]
    pairs = [(cell, near) for cell in cells for near in _around(cell, size) if cell < near]
    walls = [pair for pair in pairs if frozenset(pair) not in passages]
    # No passage brings one more than a step further from the start, so none makes the way shorter.
    harmless = [pair for pair in walls if abs(steps[pair[0]] - steps[pair[1]]) <= 1]
    count = min(int(loops * len(walls)), len(harmless))
    broken = generator.permutation(len(harmless))[:count].tolist()
    passages |= {frozenset(harmless[index]) for index in broken}
    return Maze(size, frozenset(passages), way[0], way[-1])


def _walk_through_all(generator: np.random.Generator, size: int) -> list[Cell]:
    """Draw a walk through all cells: row by row, and then shuffled by biting off its ends (Oberdorf et al. 2006).

    Source: R. Oberdorf et al., Secondary structures in long compact polymers, Physical Review E 74, 051801.
    """
    walk = [
        (row, column if row % 2 == 0 else size - 1 - column) for row in range(size) for column in range(size)
    ]
    for way, turn in generator.random((3 * size * size, 2)).tolist():
        if turn < 0.5:
            walk.reverse()
        near = [cell for cell in _around(walk[-1], size) if cell != walk[-2]]
        bitten = near[int(way * len(near))] if near else walk[-2]
        index = walk.index(bitten) + 1
        walk[index:] = walk[index:][::-1]
    return walk


def _carved(generator: np.random.Generator, size: int, loops: float) -> frozenset[Passage]:
    """Walk from cell to cell that was not seen, and backtrack at dead ends; then break through more walls."""
    passages: set[Passage] = set()
    walk = [divmod(int(generator.integers(size * size)), size)]
    seen = set(walk)
    while walk:
        fresh = [near for near in _around(walk[-1], size) if near not in seen]
        if not fresh:
            walk.pop()
            continue
        near = fresh[int(generator.integers(len(fresh)))]
        passages.add(frozenset((walk[-1], near)))
        seen.add(near)
        walk.append(near)
    cells = [divmod(cell, size) for cell in range(size * size)]
    pairs = [(cell, near) for cell in cells for near in _around(cell, size) if cell < near]
    walls = [frozenset(pair) for pair in pairs if frozenset(pair) not in passages]
    broken = generator.choice(len(walls), int(loops * len(walls)), replace=False).tolist() if walls else []
    return frozenset(passages | {walls[index] for index in broken})


def _around(cell: Cell, size: int) -> list[Cell]:
    near = [(cell[0] + down, cell[1] + right) for down, right in WAYS]
    return [(row, column) for row, column in near if 0 <= row < size and 0 <= column < size]


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
        "baselines": {"random": 0.5, "constant action": 0.01, "blind": 0.02, "expert": 1},
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
        split: TaskSplit = None,
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
        return _example_maze(self._size, split=split, **self._difficulty)

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
