"""Mazes: drawn at random, measured by shortest way."""

from collections import deque
from dataclasses import dataclass

import numpy as np

from envs.splits import Split, split_of_text

WAYS = ((-1, 0), (1, 0), (0, -1), (0, 1))
"""Rows and columns that each action adds: up, down, left, right."""

_TRIES = 500

Cell = tuple[int, int]
Passage = frozenset[Cell]
"""Two neighbouring cells with no wall between them."""


@dataclass(frozen=True)
class Maze:
    """Rooms in rows and columns, and what joins them.

    Attributes:
        size: Rows and columns.
        passages: Pairs of neighbours with no wall between them.
        start: Where one begins.
        goal: Where one wants to be.
    """

    size: int
    passages: frozenset[Passage]
    start: Cell
    goal: Cell

    def moved(self, cell: Cell, action: int) -> Cell | None:
        """Return the cell that an action leads to; None where a wall is."""
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
) -> Maze:
    """Draw mazes until one has a shortest way of the wanted length and belongs to the split.

    Args:
        generator: Draws.
        size: Rows and columns.
        loops: Share of the walls between cells that are broken through once each cell can be reached.
        min_path: Shortest way from start to goal, at least.
        max_path: And at most; None for no bound.
        split: Only mazes of this split, by content; None for any.

    Raises:
        ValueError: If no such maze turns up: the wishes contradict each other.
    """
    for _ in range(_TRIES):
        passages = _carved(generator, size, loops)
        start, goal = (
            divmod(cell, size) for cell in generator.choice(size * size, 2, replace=False).tolist()
        )
        maze = Maze(size, passages, start, goal)
        length = maze.distances()[start]
        if not min_path <= length <= (length if max_path is None else max_path):
            continue
        if split is None or split_of_text("\n".join([*maze.drawn(), f"{start} {goal}"])) == split:
            return maze
    raise ValueError(
        f"no maze of size {size} with a way of {min_path} to {max_path} steps and split {split} was found: loosen "
        "min_path or max_path, or take fewer loops"
    )


def _carved(generator: np.random.Generator, size: int, loops: float) -> frozenset[Passage]:
    """Walk from cell to cell that was not seen, back where there is none; then break through more walls."""
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
    return frozenset(passages | {walls[place] for place in broken})


def _around(cell: Cell, size: int) -> list[Cell]:
    near = [(cell[0] + down, cell[1] + right) for down, right in WAYS]
    return [(row, column) for row, column in near if 0 <= row < size and 0 <= column < size]
