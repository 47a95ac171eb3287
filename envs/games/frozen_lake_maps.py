"""Maps of the frozen lake: drawn at random, measured by shortest safe path, split by content."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from rollgym.envs.core.splits import Split, split_of_text

Rows = tuple[str, ...]

MAX_SIDE = 64
# Tries, by the cells that they look at: about thirty milliseconds, since other sessions in the process wait.
_TRIES, _CELLS, _CARVED_CELLS = 2_000, 40_000, 40_000


def split_of(rows: Rows) -> Split:
    """Return the split that a map belongs to, by its content alone: 60 % train, 20 % valid, 20 % test."""
    return split_of_text("\n".join(rows))


def goal_distances(rows: Rows) -> list[int]:
    """Return, for each cell, the length of the shortest safe path to a goal; -1 without one."""
    height, width = len(rows), len(rows[0])
    tiles = "".join(rows)
    distances = [-1] * len(tiles)
    frontier = [cell for cell, tile in enumerate(tiles) if tile == "G"]
    for cell in frontier:
        distances[cell] = 0
    while frontier:
        reached = []
        for cell in frontier:
            row, column = divmod(cell, width)
            for near, inside in (
                (cell - 1, column > 0),
                (cell + width, row < height - 1),
                (cell + 1, column < width - 1),
                (cell - width, row > 0),
            ):
                if inside and distances[near] < 0 and tiles[near] in "SF":
                    distances[near] = distances[cell] + 1
                    reached.append(near)
        frontier = reached
    return distances


def checked_map(rows: Sequence[str]) -> Rows:
    """Return a map as a tuple of rows.

    Raises:
        ValueError: If it is not a rectangle of S, F, H and G with at least one S and one G, or larger than `MAX_SIDE`.
    """
    chosen = tuple(rows) if isinstance(rows, (list, tuple)) else ()
    if not chosen or not all(isinstance(row, str) and row and set(row) <= set("SFHG") for row in chosen):
        raise ValueError("map must be a list of rows made of the letters S, F, H and G")
    if len(chosen) > MAX_SIDE or len(chosen[0]) > MAX_SIDE:
        raise ValueError(f"map has at most {MAX_SIDE} rows and columns")
    if len({len(row) for row in chosen}) != 1:
        raise ValueError("all rows of map must have the same length")
    tiles = "".join(chosen)
    if "S" not in tiles or "G" not in tiles:
        raise ValueError("map needs at least one start S and one goal G")
    return chosen


@dataclass(frozen=True, slots=True)
class MapWishes:
    """The wanted kind of maps.

    Attributes:
        size: Side.
        hole_density: Probability that a cell is a hole.
        random_start: Draw start and goal cells, too.
        min_path: Shortest safe path, at least.
        max_path: And at most; None for no bound.
    """

    size: int
    hole_density: float
    random_start: bool
    min_path: int
    max_path: int | None

    def fits(self, rows: Rows, start: int) -> bool:
        """Whether a map can be solved, on a path of the wanted length."""
        length = goal_distances(rows)[start]
        return length >= max(1, self.min_path) and (self.max_path is None or length <= self.max_path)


def draw_map(generator: np.random.Generator, wishes: MapWishes, split: Split | None) -> Rows | None:
    """Draw maps until one can be solved, has a path of the wanted length and belongs to the split.

    After some tries a straight way is laid over the holes: with many holes, hardly any map can be solved.

    Returns:
        The map; None if none turned up soon.
    """
    size = wishes.size
    tries = min(_TRIES, _CELLS // size**2)
    for attempt in range(tries + _CARVED_CELLS // size**2):
        holes = (generator.random(size * size) < wishes.hole_density).tolist()
        start, goal = 0, size * size - 1
        if wishes.random_start:
            start, goal = generator.choice(size * size, 2, replace=False).tolist()
        tiles = ["H" if hole else "F" for hole in holes]
        if attempt >= tries:
            for cell in _straight_way(generator, start, goal, size):
                tiles[cell] = "F"
        tiles[start], tiles[goal] = "S", "G"
        rows = tuple("".join(tiles[row * size : (row + 1) * size]) for row in range(size))
        if (split is None or split_of(rows) == split) and wishes.fits(rows, start):
            return rows
    return None


@lru_cache(maxsize=256)
def example_map(wishes: MapWishes, split: Split | None) -> Rows | None:
    """Return a map that fits, always the same one; None if the options contradict each other, or nearly do."""
    return draw_map(np.random.default_rng(0), wishes, split)


def _straight_way(generator: np.random.Generator, start: int, goal: int, size: int) -> list[int]:
    """Draw one of the shortest ways from start to goal."""
    (row, column), (last_row, last_column) = divmod(start, size), divmod(goal, size)
    down, right = abs(last_row - row), abs(last_column - column)
    steps = generator.permutation([True] * down + [False] * right).tolist()
    way = []
    for goes_down in steps:
        if goes_down:
            row += 1 if last_row > row else -1
        else:
            column += 1 if last_column > column else -1
        way.append(row * size + column)
    return way
