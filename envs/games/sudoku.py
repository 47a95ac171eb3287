"""Sudoku-v0: fill a grid so that each number stands once in every row, column and box.

Grids are drawn at random, reduced to clues, and solved by one search; or made from puzzles with few clues.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from itertools import count
from typing import Annotated, Any, Unpack

import numpy as np
from pydantic import Field

from rollgym.envs.core.kwargs import OneOf
from rollgym.envs.core.splits import TaskSplit, checked_split, split_of_text
from rollgym.envs.core.text_game import GameKwargs, Move, Refusal, TextGame, read_numbers

Grid = tuple[int, ...]
"""Cells row by row; 0 is empty."""

_BOXES = {4: 2, 9: 3}
"""Side of the boxes by side of the grid."""

_FEW_CLUES = 30
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


class _TooHardError(Exception):
    """The search for solutions exceeded its limit."""


@cache
def _peers(size: int) -> tuple[frozenset[int], ...]:
    """Return, for each cell, the other cells of its row, column and box."""
    box = _BOXES[size]
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
    near = _peers(size)
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
        raise _TooHardError(f"no answer within {most} positions")
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
    taken = {puzzle[peer] for peer in _peers(size)[cell]}
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
    puzzle, solution = _shuffled(generator, puzzle, solution)
    empty = [cell for cell, number in enumerate(puzzle) if not number]
    given = set(generator.permutation(empty)[: clues - (len(puzzle) - len(empty))].tolist())
    return tuple(solution[cell] if cell in given else puzzle[cell] for cell in range(len(puzzle))), solution


@cache
def _solved(index: int) -> tuple[Grid, Grid]:
    puzzle = tuple(map(int, _KNOWN[index].replace(".", "0")))
    solution = only_solution(puzzle, 9)
    assert solution is not None
    return puzzle, solution


def _shuffled(generator: np.random.Generator, puzzle: Grid, solution: Grid) -> tuple[Grid, Grid]:
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
    box = _BOXES[size]
    return [
        band * box + line
        for band in generator.permutation(box).tolist()
        for line in generator.permutation(box).tolist()
    ]


_CLUES = {4: (4, 15, 8), 9: (24, 80, 40)}
_TRIES = {4: 40, 9: 1}
# Puzzles come from clients, too, and other sessions in the process wait for their solution.
_MOST_POSITIONS = 4_000
_SHUFFLES = 60


class SudokuEnv(TextGame[tuple[int, int]]):
    """A puzzle with one solution. Any number may be written into any cell that is not given, and over another one.

    Raises:
        ValueError: If an argument makes no sense.
    """

    metadata: dict[str, Any] = TextGame.metadata | {
        "reset_options": ["expert", "puzzle", "split"],
        "description": "Fill a grid so that each number stands once in every row, column and box.",
        "observation": "The grid, and what stands twice in a row, column or box, if anything does.",
        "actions": "Row, column and number: `1 2 3`.",
        "reward": "1 when the grid is solved, else 0.",
        "max_episode_steps": 100,
        "baselines": {"random": 0, "constant action": 0, "blind": 0, "expert": 1},
    }

    def __init__(
        self,
        *,
        size: Annotated[int, OneOf(*_BOXES), Field(description="Side of the grid, 4 or 9.")] = 4,
        clues: Annotated[
            int | None,
            Field(
                ge=4,
                le=80,
                description="Numbers that are given, the fewer the harder; 8 of 16 or 40 of 81 if null.",
            ),
        ] = None,
        split: TaskSplit = None,
        max_episode_steps: Annotated[
            int, Field(ge=1, description="Numbers written, after which the episode is truncated.")
        ] = 100,
        **common: Unpack[GameKwargs],
    ) -> None:
        super().__init__("row column number", "1 2 3", max_episode_steps=max_episode_steps, **common)
        fewest, most, usual = _CLUES[size]
        self._clues = usual if clues is None else clues
        if not fewest <= self._clues <= most:
            raise ValueError(f"clues must be between {fewest} and {most} for size {size}, not {clues}")
        self._size = size
        self._split = checked_split(split)
        self._given: Grid = (0,) * size**2
        self._solution: Grid = (0,) * size**2
        self._grid: list[int] = []
        self._choices: list[str] = []

    def start_episode(self, options: Mapping[str, Any]) -> None:
        given = options.get("puzzle")
        self._given, self._solution = self._draw(options) if given is None else self._checked(given)
        self._grid = list(self._given)
        self._choices = [
            self.describe_action((cell, number))
            for cell, clue in enumerate(self._given)
            if not clue
            for number in range(1, self._size + 1)
        ]

    def _draw(self, options: Mapping[str, Any]) -> tuple[Grid, Grid]:
        split = checked_split(options.get("split", self._split))
        drawn = self._any_puzzle()
        for _ in range(_SHUFFLES):
            if drawn is None:
                break
            if split is None or split_of_text(_digits(drawn[0])) == split:
                return drawn
            drawn = _shuffled(self.np_random, *drawn)
        raise ValueError(f"no puzzle with {self._clues} clues and split {split} was found: give more clues")

    def _any_puzzle(self) -> tuple[Grid, Grid] | None:
        if self._size == 4 or self._clues >= _FEW_CLUES:
            for _ in range(_TRIES[self._size]):
                drawn = draw_puzzle(self.np_random, self._size, self._clues)
                if drawn is not None:
                    return drawn
        return known_puzzle(self.np_random, self._clues) if self._size == 9 else None

    def _checked(self, puzzle: Any) -> tuple[Grid, Grid]:
        text = puzzle.replace(".", "0") if isinstance(puzzle, str) else ""
        if len(text) != self._size**2 or not set(text) <= set("0123456789"[: self._size + 1]):
            raise ValueError(
                f"puzzle must be a text of {self._size**2} cells row by row, digits up to {self._size} and . for "
                "empty ones"
            )
        grid = tuple(map(int, text))
        try:
            solution = only_solution(grid, self._size, _MOST_POSITIONS)
        except _TooHardError:
            raise ValueError(
                "the solution of this puzzle is not found soon enough: give more clues"
            ) from None
        if solution is None or 0 not in grid:
            raise ValueError("puzzle must have an empty cell, and exactly one solution")
        return grid, solution

    def parse_action(self, text: str) -> tuple[int, int] | Refusal:
        numbers = read_numbers(text, 3)
        if numbers is None or not all(1 <= number <= self._size for number in numbers):
            return Refusal(f"Write row, column and number, each from 1 to {self._size}, as in: 1 2 3.")
        row, column, number = numbers
        cell = (row - 1) * self._size + column - 1
        if self._given[cell]:
            return Refusal(f"The number in row {row}, column {column} is given and stays.")
        return cell, number

    def apply_action(self, action: tuple[int, int]) -> Move:
        cell, number = action
        self._grid[cell] = number
        solved = tuple(self._grid) == self._solution
        return Move(float(solved), solved, solved)

    def draw_board(self) -> str:
        return "\n".join([*_rows(self._grid, self._size), *self._conflicts()])

    def _conflicts(self) -> list[str]:
        """Say which of the written numbers conflict with others: this is visible in the grid."""
        wrong = [
            cell
            for cell, number in enumerate(self._grid)
            if number
            and not self._given[cell]
            and any(self._grid[peer] == number for peer in _peers(self._size)[cell])
        ]
        places = [f"row {cell // self._size + 1}, column {cell % self._size + 1}" for cell in wrong]
        return [f"Twice in a row, column or box: {'; '.join(places)}."] if places else []

    def state_info(self) -> dict[str, Any]:
        return {
            "anchor": _digits(self._grid),
            "state": {"grid": _digits(self._grid), "given": _digits(self._given)},
        }

    def available_actions(self) -> list[str]:
        return list(self._choices)

    def describe_rules(self) -> str:
        size, box = self._size, _BOXES[self._size]
        return (
            f"You solve a Sudoku of {size} rows and {size} columns; . is an empty cell. Write numbers from 1 to {size} "
            f"into the empty cells, so that each stands exactly once in every row, column and box of {box} by {box} "
            "cells. Rows and columns count from 1 at the top left. What you have written you may write over."
        )

    def optimal_steps(self) -> int:
        return sum(number != right for number, right in zip(self._grid, self._solution, strict=True))

    def describe_action(self, action: tuple[int, int]) -> str:
        row, column = divmod(action[0], self._size)
        return f"{row + 1} {column + 1} {action[1]}"

    def expert_reply(self) -> str:
        pairs = enumerate(zip(self._grid, self._solution, strict=True))
        wrong = [(cell, right) for cell, (number, right) in pairs if number != right]
        return self.describe_action(wrong[0]) if wrong else self._choices[0]


def _digits(grid: Grid | list[int]) -> str:
    return "".join(map(str, grid)).replace("0", ".")


def _rows(grid: list[int], size: int) -> list[str]:
    """Draw a grid with lines between its boxes."""
    box = _BOXES[size]
    lines = []
    for row in range(size):
        cells = _digits(grid[row * size : (row + 1) * size])
        if row and row % box == 0:
            lines.append("+".join(["-" * (2 * box + 1)] * box)[1:-1])
        lines.append(" | ".join(" ".join(cells[start : start + box]) for start in range(0, size, box)))
    return lines
