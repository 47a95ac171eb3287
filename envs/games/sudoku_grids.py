"""Sudoku grids: drawn at random, reduced to clues, and solved by one search; or made from puzzles with few clues."""

from collections.abc import Iterator
from functools import cache
from itertools import count

import numpy as np

Grid = tuple[int, ...]
"""Cells row by row; 0 is empty."""

BOXES = {4: 2, 9: 3}
"""Side of the boxes by side of the grid."""

FEW_CLUES = 30
"""A puzzle of nine with fewer clues is made from one that is known: to get there by emptying cells takes seconds."""

# Found by emptying full grids, each with 24 clues and one solution.
_KNOWN = (
    "79...6.1..8...3......7......18...6..........2.34.18.7.14......3..5.8.2......75...",
    "......8..2....5.131...4..9..7....9.....56.....5.7.3....9......23...2...18..47.5..",
    "8.......63.94.2..86.43....129....4............7.5.8.1.........5..8.9.......6.1..3",
    "69....5.7.8.....2..471.29......7........6...8475.2.........4....1......29....53..",
    ".......5.61.......3.8...7..7......2....5...78..28.64.58....9.....6.52....3..4..6.",
    ".....147...9..3..52..8..91..6..8...........5...7214...8..9.......54.7.9........4.",
    "..74.1.....2...75.31.....2....5.....4.3.1.9...9.7...8...9.3...2.5.......7.1.....4",
    "7..2.6....8.9...1..2..7...8.5......4.......8...9.54.76...4.9.....4..3..5.......31",
    "..1..9...78....2.1...5...8..5....8..9....27...68.......4..9.1.51.....64..9.7.....",
    "...14.7.......8..1.9....65..5...7..9..2........7.691..2...9..6.58........7.4.3...",
    ".7.216..............6...37.9.2..16......2..85..8..4.....3.......578......2.46..1.",
    "..8..9...5....64...92...5.1..4.........12.96.....6...2.....1.7.1..3.2.8..7......5",
    "...8.7.....95.....6...2.9..3.......8....8.1.284......5.6.....2..254......9.3..5.7",
    ".....745....2...1.....36...8..37..2...7.1.....21.5..3..5..6...3.7...4......9..2..",
    ".7..6..........5.7...3....28....36.5.2.9......5.4.7..331.....7........19..6...2.4",
    "......9.5.2..69..4..845....1.9.38.........73......4.6....97...66..32..4..........",
)


class TooHardError(Exception):
    """The search for solutions exceeded its limit."""


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


def solutions(
    grid: Grid, size: int, order: np.random.Generator | None = None, most: int | None = None
) -> Iterator[Grid]:
    """Yield all ways to fill a grid, the cell with the fewest candidates first.

    Args:
        grid: The given cells.
        size: Its side.
        order: Shuffles the candidates of each cell.
        most: Positions that are looked at; None for as many as it takes.

    Raises:
        TooHardError: There are more of them.
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
    yield from _fill(list(grid), left, near, order, count(), most)


def _fill(
    grid: list[int],
    left: list[int],
    near: tuple[frozenset[int], ...],
    order: np.random.Generator | None,
    looks: Iterator[int],
    most: int | None,
) -> Iterator[Grid]:
    if most is not None and next(looks) >= most:
        raise TooHardError(f"no answer within {most} positions")
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
            yield from _fill(grid, left, near, order, looks, most)
        grid[cell] = 0
        for peer in touched:
            left[peer] ^= 1 << bit


def only_solution(grid: Grid, size: int, most: int | None = None) -> Grid | None:
    """Return the solution of a grid; None if there is none, or more than one. Raises as `solutions`."""
    found = solutions(grid, size, most=most)
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


def known_puzzle(generator: np.random.Generator, clues: int) -> tuple[Grid, Grid]:
    """Return a puzzle of nine and its solution, made from a known one with 24 clues.

    Numbers, rows, columns, bands and stacks change places, and some more cells are given; its solution stays the only
    one.
    """
    puzzle, solution = _solved(int(generator.integers(len(_KNOWN))))
    puzzle, solution = shuffled(generator, puzzle, solution)
    empty = [cell for cell, number in enumerate(puzzle) if not number]
    given = set(generator.permutation(empty)[: clues - (len(puzzle) - len(empty))].tolist())
    return tuple(solution[cell] if cell in given else puzzle[cell] for cell in range(len(puzzle))), solution


@cache
def _solved(index: int) -> tuple[Grid, Grid]:
    puzzle = tuple(map(int, _KNOWN[index].replace(".", "0")))
    solution = only_solution(puzzle, 9)
    assert solution is not None
    return puzzle, solution


def shuffled(generator: np.random.Generator, puzzle: Grid, solution: Grid) -> tuple[Grid, Grid]:
    """Return a puzzle and its solution with other numbers, rows and columns, in a way that keeps all rules."""
    size = round(len(puzzle) ** 0.5)
    numbers = [0, *(1 + generator.permutation(size)).tolist()]
    rows, columns = _lines(generator, size), _lines(generator, size)
    cells = [row * size + column for row in rows for column in columns]
    if generator.random() < 0.5:
        cells = [cells[column * size + row] for row in range(size) for column in range(size)]
    first, second = (tuple(numbers[grid[cell]] for cell in cells) for grid in (puzzle, solution))
    return first, second


def _lines(generator: np.random.Generator, size: int) -> list[int]:
    box = BOXES[size]
    return [
        band * box + line
        for band in generator.permutation(box).tolist()
        for line in generator.permutation(box).tolist()
    ]
