"""Sudoku grids: drawn at random, reduced to clues, and solved; all by one search."""

from collections.abc import Iterator
from functools import cache

import numpy as np

Grid = tuple[int, ...]
"""Cells row by row; 0 is empty."""

BOXES = {4: 2, 9: 3}
"""Side of the boxes by side of the grid."""


@cache
def peers(size: int) -> tuple[frozenset[int], ...]:
    """Return, for each cell, the other cells of its row, column and box."""
    box = BOXES[size]
    units = [{(row, column) for column in range(size)} for row in range(size)]
    units += [{(row, column) for row in range(size)} for column in range(size)]
    units += [
        {(top + row, left + column) for row in range(box) for column in range(box)}
        for top in range(0, size, box)
        for left in range(0, size, box)
    ]
    cells = [(row, column) for row in range(size) for column in range(size)]
    return tuple(
        frozenset(
            row * size + column
            for unit in units
            if cell in unit
            for row, column in unit
            if (row, column) != cell
        )
        for cell in cells
    )


def solutions(grid: Grid, size: int, order: np.random.Generator | None = None) -> Iterator[Grid]:
    """Yield all ways to fill a grid, the cell with the fewest candidates first.

    Args:
        grid: What is given.
        size: Its side.
        order: Shuffles the candidates of each cell.
    """
    near = peers(size)
    everything = (1 << size) - 1
    left = [everything] * len(grid)
    for cell, number in enumerate(grid):
        if number:
            for peer in near[cell]:
                left[peer] &= ~(1 << (number - 1))
    if any(number and not left[cell] >> (number - 1) & 1 for cell, number in enumerate(grid)):
        return
    yield from _fill(list(grid), left, near, order)


def _fill(
    grid: list[int], left: list[int], near: tuple[frozenset[int], ...], order: np.random.Generator | None
) -> Iterator[Grid]:
    empty = [cell for cell, number in enumerate(grid) if number == 0]
    if not empty:
        yield tuple(grid)
        return
    cell = min(empty, key=lambda each: left[each].bit_count())
    candidates = [bit for bit in range(len(near[0])) if left[cell] >> bit & 1]
    if order is not None:
        order.shuffle(candidates)
    for bit in candidates:
        touched = [peer for peer in near[cell] if grid[peer] == 0 and left[peer] >> bit & 1]
        for peer in touched:
            left[peer] ^= 1 << bit
        grid[cell] = bit + 1
        if all(left[peer] for peer in touched):
            yield from _fill(grid, left, near, order)
        grid[cell] = 0
        for peer in touched:
            left[peer] ^= 1 << bit


def only_solution(grid: Grid, size: int) -> Grid | None:
    """Return the solution of a grid; None if there is none, or more than one."""
    found = solutions(grid, size)
    first = next(found, None)
    return first if first is not None and next(found, None) is None else None


def draw_puzzle(generator: np.random.Generator, size: int, clues: int) -> tuple[Grid, Grid] | None:
    """Draw a full grid and empty cells in random order, as long as its solution stays the only one.

    Returns:
        The puzzle and its solution; None if so few clues could not be reached from this grid.
    """
    solution = next(solutions((0,) * size**2, size, generator))
    puzzle = list(solution)
    given = size**2
    for cell in generator.permutation(size**2).tolist():
        if given == clues:
            break
        number, puzzle[cell] = puzzle[cell], 0
        if _could_be_another(tuple(puzzle), size, cell, number):
            puzzle[cell] = number
        else:
            given -= 1
    return (tuple(puzzle), solution) if given == clues else None


def _could_be_another(puzzle: Grid, size: int, cell: int, number: int) -> bool:
    """Return whether a puzzle with an empty cell has a solution in which something else than a number stands there."""
    taken = {puzzle[peer] for peer in peers(size)[cell]}
    for other in range(1, size + 1):
        if other != number and other not in taken:
            filled = (*puzzle[:cell], other, *puzzle[cell + 1 :])
            if next(solutions(filled, size), None) is not None:
                return True
    return False
