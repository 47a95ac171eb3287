"""Minefields: what lies beside a cell, what a cell opens, and fields that reasoning alone can clear."""

from collections.abc import Set
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from rollgym.envs.core.splits import Split, split_of_text
from rollgym.envs.games.minesweeper_solver import Clue, Effort, TooHardError, mine_chances

_TRIES = 2_000
# About thirty milliseconds: other sessions in the process wait.
_EFFORT, _EFFORT_FOR_ONE = 4_000, 1_000
_NOISE = (1.5, 1.0, 0.5, *[0.25] * 37)


@lru_cache(maxsize=256)
def neighbours(rows: int, columns: int) -> tuple[frozenset[int], ...]:
    """Return, for each cell, those around it."""
    return tuple(
        frozenset(
            near * columns + beside
            for near in range(max(0, row - 1), min(rows, row + 2))
            for beside in range(max(0, column - 1), min(columns, column + 2))
            if (near, beside) != (row, column)
        )
        for row in range(rows)
        for column in range(columns)
    )


@dataclass(frozen=True, slots=True)
class Minefield:
    """The positions of the mines.

    Attributes:
        rows: Rows of the field.
        columns: Columns of the field.
        mines: Cells with a mine.
    """

    rows: int
    columns: int
    mines: frozenset[int]

    def number(self, cell: int) -> int:
        """Return how many mines are around a cell."""
        return len(neighbours(self.rows, self.columns)[cell] & self.mines)

    def opened_by(self, cell: int) -> set[int]:
        """Return the cells that open with one: itself, and, if no mine is near, its neighbours, and so on."""
        opened, frontier = {cell}, [cell]
        while frontier:
            current = frontier.pop()
            if self.number(current) == 0:
                fresh = neighbours(self.rows, self.columns)[current] - opened
                opened |= fresh
                frontier.extend(fresh)
        return opened

    def clues(self, opened: Set[int]) -> list[Clue]:
        """Return what open cells say of covered ones."""
        near = neighbours(self.rows, self.columns)
        return [(near[cell] - opened, self.number(cell)) for cell in sorted(opened) if near[cell] - opened]

    def solvable_from(self, first: int, effort: Effort | None = None) -> bool:
        """Return whether reasoning alone clears the field once a cell is open.

        Raises:
            TooHardError: That takes more than the effort to find out.
        """
        opened = self.opened_by(first)
        cells = set(range(self.rows * self.columns))
        while len(opened) < len(cells) - len(self.mines):
            chances = mine_chances(cells - opened, self.clues(opened), len(self.mines), effort)
            safe = [cell for cell, chance in chances.items() if chance == 0]
            if not safe:
                return False
            for cell in safe:
                opened |= self.opened_by(cell)
        return True


def draw_minefield(
    generator: np.random.Generator,
    rows: int,
    columns: int,
    mines: int,
    first: int,
    *,
    solvable: bool,
    split: Split | None,
) -> Minefield:
    """Draw a field in which the first cell and, if there is room, those around it have no mine.

    Fields of many mines that can be cleared by reasoning are rare. After some of them the mines are drawn away from the
    first cell, a little at first and then more, which makes them easier.

    Raises:
        ValueError: If no such field turns up.
    """
    free = {first} | neighbours(rows, columns)[first]
    if rows * columns - len(free) < mines:
        free = {first}
    cells = sorted(set(range(rows * columns)) - free)
    effort = Effort(_EFFORT)
    for _ in range(_TRIES):
        field = Minefield(rows, columns, frozenset(generator.choice(cells, mines, replace=False).tolist()))
        if not _is_of(field, split):
            continue
        try:
            if not solvable or field.solvable_from(first, effort):
                return field
        except TooHardError:
            break
    away = np.array(
        [
            max(abs(cell // columns - first // columns), abs(cell % columns - first % columns))
            for cell in cells
        ]
    )
    for noise in _NOISE:
        farthest = np.argsort(-(away + noise * generator.standard_normal(len(cells))))
        field = Minefield(rows, columns, frozenset(cells[index] for index in farthest[:mines].tolist()))
        if _is_of(field, split) and _is_easy(field, first):
            return field
    raise ValueError(f"no field of {rows}x{columns} with {mines} mines was found: take fewer mines")


def _is_of(field: Minefield, split: Split | None) -> bool:
    text = f"{field.rows}x{field.columns} {sorted(field.mines)}"
    return split is None or split_of_text(text) == split


def _is_easy(field: Minefield, first: int) -> bool:
    try:
        return field.solvable_from(first, Effort(_EFFORT_FOR_ONE))
    except TooHardError:
        return False
