"""Mazes: drawn at random, measured by shortest way, and wound around a long way on request."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from rollgym.envs.core.splits import Split, split_of_text

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
def example_maze(
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
