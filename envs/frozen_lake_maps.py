"""Maps of the frozen lake: drawn at random, measured by shortest safe path, split by content."""

from collections.abc import Sequence

import numpy as np

from envs.splits import Split, split_of_text

Rows = tuple[str, ...]

MAX_SIDE = 64
# Tries, by the cells that they look at: about a second, so that wishes which contradict each other hold nobody up.
_TRIES, _CELLS = 50_000, 2_000_000


def split_of(rows: Rows) -> Split:
    """Return the split that a map belongs to, by its content alone: 60 % train, 20 % valid, 20 % test."""
    return split_of_text("\n".join(rows))


def goal_distances(rows: Rows) -> list[int]:
    """Return, for each cell, the length of the shortest safe path to a goal; -1 where there is none."""
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


def draw_map(
    generator: np.random.Generator,
    *,
    size: int,
    hole_density: float,
    random_start: bool,
    min_path: int,
    max_path: int | None,
    split: Split | None,
) -> Rows:
    """Draw maps until one can be solved, has a path of the wanted length and belongs to the split.

    Raises:
        ValueError: If no such map turns up: the wishes contradict each other.
    """
    for _ in range(min(_TRIES, _CELLS // size**2)):
        holes = (generator.random(size * size) < hole_density).tolist()
        start, goal = 0, size * size - 1
        if random_start:
            start, goal = generator.choice(size * size, 2, replace=False).tolist()
        tiles = ["H" if hole else "F" for hole in holes]
        tiles[start], tiles[goal] = "S", "G"
        rows = tuple("".join(tiles[row * size : (row + 1) * size]) for row in range(size))
        if split is not None and split_of(rows) != split:
            continue
        length = goal_distances(rows)[start]
        if length >= max(1, min_path) and (max_path is None or length <= max_path):
            return rows
    raise ValueError(
        f"no map of size {size} with hole_density {hole_density}, a path of {min_path} to {max_path} steps and split "
        f"{split} was found: loosen min_path, max_path or hole_density"
    )
