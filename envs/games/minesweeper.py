"""Minesweeper-v0: open all cells without mines; numbers say how many mines are beside a cell."""

from collections.abc import Mapping
from typing import Annotated, Any, Unpack

from pydantic import Field

from rollgym.envs.core.splits import SPLIT, checked_split
from rollgym.envs.core.text_game import GameKwargs, Move, Refusal, StepLimit, TextGame, read_numbers
from rollgym.envs.games.minefield import Minefield, draw_minefield
from rollgym.envs.games.minesweeper_solver import Effort, TooHardError, guessed_chances, mine_chances

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
        split: Annotated[
            str | None, SPLIT, Field(description="Only fields of this split, by content.")
        ] = None,
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
        except TooHardError:
            chances = guessed_chances(covered, clues, self._mines)
        best = min(sorted(chances), key=lambda cell: chances[cell])
        return self.describe_action(("flag" if best in self._flags else "reveal", best))
