"""Minesweeper-v0: open all cells without mines; numbers say how many mines are beside a cell.

Fields can be drawn that reasoning alone can clear: a solver infers the exact chance of a mine under each covered cell.
"""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import comb, prod
from typing import Annotated, Any, Unpack

import numpy as np
from pydantic import Field

from rollgym.envs.core.splits import Split, TaskSplit, checked_split, split_of_text
from rollgym.envs.core.text_game import GameKwargs, Move, Refusal, StepLimit, TextGame, read_numbers

Clue = tuple[frozenset[int], int]
"""Covered cells, and how many mines lie under them."""

_Group = tuple[int, ...]
"""Covered cells that stand beside the same clues, so that they are alike."""
_Counts = dict[int, tuple[int, list[int]]]
"""By number of mines: in how many ways they can lie, and, for each group, how many mines those put there in all."""


class Effort:
    """How much is looked at before a search is given up.

    Args:
        most: Ways to put mines that are tried.
    """

    def __init__(self, most: int) -> None:
        self.left = most

    def spend(self, count: int = 1) -> None:
        """Count some.

        Raises:
            TooHardError: There were as many as there may be.
        """
        self.left -= count
        if self.left < 0:
            raise _TooHardError


class _TooHardError(Exception):
    """The search for mines exceeded its limit."""


def _guessed_chances(covered: Set[int], clues: Sequence[Clue], mines: int) -> dict[int, Fraction]:
    """Return what each clue alone says of the cells beside it, if all of them together are too many to count."""
    chances = dict.fromkeys(covered, Fraction(mines, len(covered)))
    for cells, near in clues:
        for cell in cells:
            chances[cell] = max(Fraction(near, len(cells)), chances[cell] if near else Fraction(0))
    for cells, near in clues:
        if not near:
            chances.update(dict.fromkeys(cells, Fraction(0)))
    return chances


def mine_chances(
    covered: Set[int], clues: Sequence[Clue], mines: int, effort: Effort | None = None
) -> dict[int, Fraction]:
    """Return the chance of a mine under each covered cell, all fields that fit the clues being equally likely.

    Args:
        covered: Covered cells.
        clues: The clues of the open cells on them.
        mines: Mines under all covered cells together.
        effort: Limit of the search; None for no limit.

    Raises:
        TooHardError: It takes more than that.
    """
    if effort is not None:
        effort.spend(len(covered))  # what follows takes as long as some ways for each of them
    components = [(groups, _counts(groups, near, effort)) for groups, near in _components(clues)]
    rest = tuple(sorted(covered - {cell for groups, _ in components for group in groups for cell in group}))
    components.append(
        ((rest,), {k: (comb(len(rest), k), [k * comb(len(rest), k)]) for k in range(len(rest) + 1)})
    )
    chances: dict[int, Fraction] = {}
    for index, (groups, counts) in enumerate(components):
        others: dict[int, int] = {0: 1}
        for position, (_, other) in enumerate(components):
            if position != index:
                others = _joined(others, {number: ways for number, (ways, _) in other.items()})
        total = sum(ways * others.get(mines - number, 0) for number, (ways, _) in counts.items())
        for position, group in enumerate(groups):
            under = sum(
                per_group[position] * others.get(mines - number, 0)
                for number, (_, per_group) in counts.items()
            )
            chances.update((cell, Fraction(under, total * len(group))) for cell in group)
    return chances


def _joined(one: Mapping[int, int], other: Mapping[int, int]) -> dict[int, int]:
    joined: dict[int, int] = {}
    for number, ways in one.items():
        for more, further in other.items():
            joined[number + more] = joined.get(number + more, 0) + ways * further
    return joined


def _components(clues: Sequence[Clue]) -> Iterator[tuple[tuple[_Group, ...], list[Clue]]]:
    """Divide clues into sets that have no cell in common; yield each with its groups of cells."""
    left = [clue for clue in clues if clue[0]]
    while left:
        near = [left.pop()]
        cells = set(near[0][0])
        while touching := [clue for clue in left if clue[0] & cells]:
            near += touching
            left = [clue for clue in left if clue not in touching]
            cells.update(*(clue[0] for clue in touching))
        alike: dict[tuple[bool, ...], list[int]] = {}
        for cell in sorted(cells):
            alike.setdefault(tuple(cell in clue[0] for clue in near), []).append(cell)
        yield tuple(map(tuple, alike.values())), near


def _counts(groups: tuple[_Group, ...], clues: Sequence[Clue], effort: Effort | None) -> _Counts:
    """Count the ways to put mines into the groups of one component."""
    within = [[index for index, group in enumerate(groups) if group[0] in cells] for cells, _ in clues]
    beside = [
        [number for number, members in enumerate(within) if index in members] for index in range(len(groups))
    ]
    # Groups that share clues follow each other, so that a clue is complete, or broken, soon.
    order = sorted(range(len(groups)), key=lambda index: min(beside[index]))
    wanted = [mines for _, mines in clues]
    room = [sum(len(groups[index]) for index in members) for members in within]
    placed = [0] * len(groups)
    counts: _Counts = {}

    def put(step: int) -> None:
        if effort is not None:
            effort.spend()
        if step == len(order):
            ways = prod(comb(len(group), number) for group, number in zip(groups, placed, strict=True))
            before, per_group = counts.get(sum(placed), (0, [0] * len(groups)))
            added = [known + ways * number for known, number in zip(per_group, placed, strict=True)]
            counts[sum(placed)] = (before + ways, added)
            return
        index = order[step]
        size = len(groups[index])
        for number in range(size + 1):
            for clue in beside[index]:
                wanted[clue] -= number
                room[clue] -= size
            if all(0 <= wanted[clue] <= room[clue] for clue in beside[index]):
                placed[index] = number
                put(step + 1)
                placed[index] = 0
            for clue in beside[index]:
                wanted[clue] += number
                room[clue] += size

    put(0)
    return counts


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
        except _TooHardError:
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
    except _TooHardError:
        return False


_VERBS = ("reveal", "flag")
_MOST = 16
# Ways to put mines that an expert looks at: about thirty milliseconds.
_MOST_WAYS = 10_000
_DENSEST = {True: 0.2, False: 0.5}


class MinesweeperEnv(TextGame[tuple[str, int]]):
    """A minefield that is laid when the first cell is revealed, which therefore is safe, and so are those beside it.

    Raises:
        ValueError: If an argument makes no sense.
    """

    metadata: dict[str, Any] = TextGame.metadata | {
        "reset_options": ["expert", "split"],
        "description": "Open all cells without mines.",
        "observation": "The field: numbers of mines around open cells, covered cells and flags.",
        "actions": "`reveal ROW COLUMN` or `flag ROW COLUMN`.",
        "reward": "1 when all cells without a mine are open, else 0; a mine ends the game.",
        "max_episode_steps": 100,
        "baselines": {"random": 0, "constant action": 0, "blind": 0.02, "expert": 1},
    }

    def __init__(
        self,
        *,
        rows: Annotated[int, Field(ge=4, le=_MOST, description="Rows of the field.")] = 6,
        columns: Annotated[int, Field(ge=4, le=_MOST, description="Columns of the field.")] = 6,
        mines: Annotated[int, Field(ge=1, description="Mines in it.")] = 5,
        solvable: Annotated[
            bool,
            Field(
                description=(
                    "Only fields that can be cleared by reasoning alone from the first cell on, without a"
                    " guess."
                )
            ),
        ] = True,
        split: TaskSplit = None,
        max_episode_steps: StepLimit = 100,
        **common: Unpack[GameKwargs],
    ) -> None:
        super().__init__(
            "reveal ROW COLUMN, flag ROW COLUMN", "reveal 2 3", max_episode_steps=max_episode_steps, **common
        )
        most = int(rows * columns * _DENSEST[solvable])
        if mines > most:
            raise ValueError(
                f"mines must be at most {most} on {rows}x{columns} cells with solvable={solvable}, not {mines}"
            )
        self._height, self._width = rows, columns
        self._mines = mines
        self._solvable = solvable
        self._default_split = checked_split(split)
        self._split = self._default_split
        self._field: Minefield | None = None
        self._open: set[int] = set()
        self._flags: set[int] = set()
        self._exploded: int | None = None
        self._first: int | None = None

    def start_episode(self, options: Mapping[str, Any]) -> None:
        self._split = checked_split(options.get("split", self._default_split))
        self._field = None
        self._open = set()
        self._flags = set()
        self._exploded = None
        self._first = None

    def parse_action(self, text: str) -> tuple[str, int] | Refusal:
        verb, _, place = text.strip("\"'`“”‘’. \t\r\n").lower().partition(" ")
        numbers = read_numbers(place, 2)
        if verb not in _VERBS or numbers is None:
            return Refusal("Say reveal or flag, a row and a column, as in: reveal 2 3.")
        row, column = numbers[0] - 1, numbers[1] - 1
        if not (0 <= row < self._height and 0 <= column < self._width):
            return Refusal(f"Rows go from 1 to {self._height}, columns from 1 to {self._width}.")
        cell = row * self._width + column
        if cell in self._open:
            return Refusal("That cell is open already.")
        if verb == "reveal" and cell in self._flags:
            return Refusal("That cell has a flag: flag it once more to take it off first.")
        return verb, cell

    def apply_action(self, action: tuple[str, int]) -> Move:
        verb, cell = action
        if verb == "flag":
            self._flags ^= {cell}
            return Move(0.0, False, False)
        if self._field is None:
            self._first = cell
            self._field = draw_minefield(
                *(self.np_random, self._height, self._width, self._mines, cell),
                solvable=self._solvable,
                split=self._split,
            )
        if cell in self._field.mines:
            self._exploded = cell
            return Move(0.0, True, False)
        self._open |= self._field.opened_by(cell) - self._flags
        cleared = len(self._open) == self._height * self._width - self._mines
        return Move(float(cleared), cleared, cleared)

    def draw_board(self) -> str:
        header = "    " + " ".join(f"{column + 1:2}" for column in range(self._width))
        rows = [
            f"{row + 1:2}  "
            + " ".join(f"{self._symbol(row * self._width + column):>2}" for column in range(self._width))
            for row in range(self._height)
        ]
        return "\n".join([header, *rows])

    def _symbol(self, cell: int) -> str:
        if cell == self._exploded:
            return "*"
        if cell in self._open:
            assert self._field is not None
            return str(self._field.number(cell))
        return "F" if cell in self._flags else "."

    def _cells(self) -> list[str]:
        return [self._symbol(cell) for cell in range(self._height * self._width)]

    def state_info(self) -> dict[str, Any]:
        cells = "".join(self._cells())
        starts = range(0, len(cells), self._width)
        rows = [cells[start : start + self._width] for start in starts]
        # The mines follow from the seed and the first cell; players do not know them, so the anchor excludes them.
        return {"anchor": f"{self._first} {cells}", "state": {"rows": rows, "mines": self._mines}}

    def available_actions(self) -> list[str]:
        actions = []
        for cell in range(self._height * self._width):
            if cell not in self._open:
                verbs = ("flag",) if cell in self._flags else _VERBS
                actions += [self.describe_action((verb, cell)) for verb in verbs]
        return actions

    def describe_rules(self) -> str:
        reasoning = " The field can be cleared by reasoning alone." if self._solvable else ""
        return (
            f"There are {self._mines} mines under {self._height} rows and {self._width} columns of covered cells "
            "(.). Reveal all cells without a mine: an open cell shows how many of the up to eight cells around it have "
            "one, and one that shows 0 opens those around it. Revealing a mine (*) loses the game; the first cell is "
            "safe. A flag (F) marks a cell; to flag it again takes the flag off. Rows and columns count from 1."
            f"{reasoning}"
        )

    def describe_action(self, action: tuple[str, int]) -> str:
        row, column = divmod(action[1], self._width)
        return f"{action[0]} {row + 1} {column + 1}"

    def expert_reply(self) -> str:
        """Reveal the cell that is least likely to have a mine; flags are taken for what they are: marks."""
        if self._exploded is not None or self._field is None:
            middle = (self._height // 2) * self._width + self._width // 2
            return self.describe_action(("flag" if middle in self._flags else "reveal", middle))
        covered = set(range(self._height * self._width)) - self._open
        if len(covered) == self._mines:
            return self.describe_action(("flag", min(covered)))
        clues = self._field.clues(self._open)
        try:
            chances = mine_chances(covered, clues, self._mines, Effort(_MOST_WAYS))
        except _TooHardError:
            chances = _guessed_chances(covered, clues, self._mines)
        best = min(sorted(chances), key=lambda cell: chances[cell])
        return self.describe_action(("flag" if best in self._flags else "reveal", best))
