"""Sudoku-v0: fill a grid so that each number stands once in every row, column and box."""

from collections.abc import Mapping
from typing import Annotated, Any, Unpack

from pydantic import Field

from rollgym.envs.core.kwargs import OneOf
from rollgym.envs.core.splits import SPLIT, checked_split, split_of_text
from rollgym.envs.core.text_game import GameKwargs, Move, Refusal, TextGame, read_numbers
from rollgym.envs.games.sudoku_grids import (
    BOXES,
    FEW_CLUES,
    Grid,
    TooHardError,
    draw_puzzle,
    known_puzzle,
    only_solution,
    peers,
    shuffled,
)

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
    }

    def __init__(
        self,
        *,
        size: Annotated[int, OneOf(*BOXES), Field(description="Side of the grid, 4 or 9.")] = 4,
        clues: Annotated[
            int | None,
            Field(
                ge=4,
                le=80,
                description="Numbers that are given, the fewer the harder; 8 of 16 or 40 of 81 if null.",
            ),
        ] = None,
        split: Annotated[
            str | None, SPLIT, Field(description="Only puzzles of this split, by content.")
        ] = None,
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
            drawn = shuffled(self.np_random, *drawn)
        raise ValueError(f"no puzzle with {self._clues} clues and split {split} was found: give more clues")

    def _any_puzzle(self) -> tuple[Grid, Grid] | None:
        if self._size == 4 or self._clues >= FEW_CLUES:
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
        except TooHardError:
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
            and any(self._grid[peer] == number for peer in peers(self._size)[cell])
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
        size, box = self._size, BOXES[self._size]
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
    box = BOXES[size]
    lines = []
    for row in range(size):
        cells = _digits(grid[row * size : (row + 1) * size])
        if row and row % box == 0:
            lines.append("+".join(["-" * (2 * box + 1)] * box)[1:-1])
        lines.append(" | ".join(" ".join(cells[start : start + box]) for start in range(0, size, box)))
    return lines
