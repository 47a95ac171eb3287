"""Sokoban-v0: push every box onto a target. Rules and rewards are those of gym-sokoban."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Unpack

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from rollgym.envs.core.grid import GridGame, Move, Observation
from rollgym.envs.core.kwargs import OPERATOR, OneOf
from rollgym.envs.core.splits import SPLIT, Split, checked_split
from rollgym.envs.core.text_game import GameKwargs, StepLimit
from rollgym.envs.games.sokoban.board import (
    ACTIONS,
    Level,
    SearchLimitError,
    parse_level,
    push_distances,
    solve,
)
from rollgym.envs.games.sokoban.generator import EXAMPLES, Difficulty, GeneratedLevel, example_level, generate
from rollgym.envs.games.sokoban.levels import LevelBank, load_bank
from rollgym.user_paths import expand_user

VOCABULARIES: Mapping[str, Mapping[str, str]] = {
    "xsb": {symbol: symbol for symbol in "#@+$*. "},
    "ragen": {"#": "#", "@": "P", "+": "S", "$": "X", "*": "√", ".": "O", " ": "_"},
    "letters": {"#": "W", "@": "A", "+": "@", "$": "B", "*": "C", ".": "G", " ": "."},
}
"""Symbols that cells are drawn with for the policy, by XSB symbol."""

_MEANINGS = {
    "#": "a wall",
    "@": "you",
    "+": "you on a target",
    "$": "a box",
    "*": "a box on a target",
    ".": "a target",
    " ": "floor",
}
_STEP, _BOX_ON, _BOX_OFF, _SOLVED = -0.1, 1.0, -1.0, 10.0
_COLOURS = {
    "#": (90, 90, 90),
    "@": (235, 235, 225),
    "+": (230, 170, 170),
    "$": (190, 130, 60),
    "*": (80, 170, 80),
    ".": (230, 170, 170),
    " ": (235, 235, 225),
}
_PLAYER = (60, 120, 200)
# About thirty milliseconds. A level may come from a client, and other sessions in the process wait meanwhile.
_MAX_STATES = 8_000


class SokobanEnv(GridGame):
    """Boxes, targets, and a player who can only push.

    Raises:
        ValueError: If an argument makes no sense.
    """

    metadata: dict[str, Any] = GridGame.metadata | {
        "reset_options": ["expert", "level", "level_index", "split"],
        "description": "Push every box onto a target; boxes cannot be pulled.",
        "observation": (
            "The board, row by row, in the symbols of the `vocabulary`, which the instruction explains; or a picture "
            "of it, as `observation` says, with what the `profile` adds in `info['caption']`."
        ),
        "actions": "`Up`, `Down`, `Left` or `Right`; walking into a box pushes it.",
        "reward": (
            "-0.1 a step, +1 for a box put on a target, -1 for one taken off, +10 when all are "
            "there. Success is that."
        ),
        "max_episode_steps": 120,
        "baselines": {
            "random": [0.37, -4.5],
            "constant action": [0.04, -11.1],
            "empty reply": [0, -2],
            "echo": [0, -2],
            "echo of the instruction": [0, -0.1],
            "blind": [0.07, 0.385],
            "expert": [1, 10.5],
        },
    }

    def __init__(
        self,
        *,
        size: Annotated[
            Sequence[Annotated[int, Field(ge=4, le=20)]],
            Field(
                min_length=2,
                max_length=2,
                description="Rows and columns of a generated level, walls included; with images, of every level.",
            ),
        ] = (6, 6),
        boxes: Annotated[int, Field(ge=1, le=6, description="Boxes of a generated level.")] = 1,
        min_moves: Annotated[int, Field(ge=1, description="Fewest moves of an optimal solution.")] = 1,
        max_moves: Annotated[
            int | None, Field(ge=1, description="Most moves of an optimal solution.")
        ] = None,
        level: Annotated[
            str | None,
            Field(
                json_schema_extra={"format": "multiline"},
                description="One level as XSB text; wins over size and difficulty, and over level files.",
            ),
        ] = None,
        levels_file: Annotated[
            str | None,
            OPERATOR,
            Field(
                description=(
                    "A level file, which levels are drawn from in place of the generator; wins over size "
                    "and difficulty."
                )
            ),
        ] = None,
        data_dir: Annotated[
            str | None, OPERATOR, Field(description="A directory of level files, in the same way.")
        ] = None,
        split: Annotated[
            str | None,
            SPLIT,
            Field(description="Only levels of this split, by content up to symmetry; null for any."),
        ] = "train",
        vocabulary: Annotated[
            str | None,
            OneOf(*VOCABULARIES, None),
            Field(
                description='How cells are drawn: "xsb", "ragen" or "letters"; the profile\'s own if null.'
            ),
        ] = None,
        dead_squares: Annotated[
            bool, Field(description="Report in `info` the cells that a box can never leave for a target.")
        ] = False,
        observation: Observation = "text",
        max_episode_steps: StepLimit = 120,
        **common: Unpack[GameKwargs],
    ) -> None:
        super().__init__(
            ACTIONS,
            max_episode_steps=max_episode_steps,
            **common,
        )
        if max_moves is not None and max_moves < min_moves:
            raise ValueError(f"max_moves {max_moves} is below min_moves {min_moves}")
        if levels_file is not None and data_dir is not None:
            raise ValueError("levels_file and data_dir exclude each other: put the file into the directory")
        symbols = vocabulary or self.profile.legend
        self._fixed = None if level is None else parse_level(level)
        path = levels_file or data_dir
        self._bank = None if path is None else load_bank(expand_user(str(path)))
        self._source: dict[str, Any] | None = None
        self._difficulty = Difficulty(int(size[0]), int(size[1]), boxes, min_moves, max_moves)
        self._split = checked_split(split)
        drawn = self._fixed is None and self._bank is None
        if drawn and example_level(self._difficulty, self._split) is None:
            raise ValueError(
                f"no level of size {size[0]}x{size[1]} with {boxes} boxes, {min_moves} to {max_moves} moves and split "
                f"{split} was found: loosen min_moves, max_moves or size, or take fewer boxes"
            )
        self._symbols = str.maketrans(dict(VOCABULARIES[symbols]))
        self._legend = VOCABULARIES[symbols]
        self._shows_dead_squares = dead_squares
        self._level = self._fixed or parse_level("####\n#@$.#\n####")
        self._text = self._level.to_xsb()
        self._known_optimum: int | None = None
        self._searched_optimum = True
        self._plan: list[int] = []
        self._planned_for: Level | None = None
        self._on_target = 0
        self._unsolved: Level | None = None
        if observation == "image":
            room = None if self._fixed is None else self._fixed.room
            self.observe_pictures(
                *((int(size[0]), int(size[1])) if room is None else (room.height, room.width))
            )

    # -- the game --------------------------------------------------------------------------------------------------

    def start_episode(self, options: Mapping[str, Any]) -> None:
        self._known_optimum = None
        self._source = None
        made: GeneratedLevel | None = None
        given = options.get("level")
        if options.get("level_index") is not None and self._bank is None:
            raise ValueError(
                "level_index chooses among the levels of a file, and this server has none (levels_file)"
            )
        if given is not None:
            if not isinstance(given, str):
                raise ValueError(f"a level is text in the symbols of XSB, not {type(given).__name__}")
            fixed = parse_level(given)
        elif self._fixed is not None:
            fixed = self._fixed
        elif self._bank is not None:
            fixed = self._from_bank(self._bank, options)
        else:
            split = checked_split(options.get("split", self._split))
            made = generate(self.np_random, self._difficulty, split) or self._example(split)
            fixed = made.level
        self.require_fitting(fixed.room.height, fixed.room.width)
        self._level = fixed
        self._text = fixed.to_xsb()
        self._plan, self._planned_for = [], None
        self._searched_optimum = made is None
        if made is not None:
            self._known_optimum = made.optimal_moves
            self._plan, self._planned_for = list(made.solution), fixed if made.solution else None
        # gym-sokoban counts from zero even if a box starts on a target: the first step then pays for it.
        self._on_target = 0

    def _example(self, split: Split | None) -> GeneratedLevel:
        """One of the levels that are kept for seeds that find none, which `info` says."""
        number = int(self.np_random.integers(EXAMPLES))
        made = example_level(self._difficulty, split, number)
        if made is None:
            raise ValueError(f"no level of split {split} was found: loosen min_moves, max_moves or size")
        self._source = {"example": number}
        return made

    def _from_bank(self, bank: LevelBank, options: Mapping[str, Any]) -> Level:
        index = options.get("level_index")
        if index is None:
            drawn = bank.draw(self.np_random, checked_split(options.get("split", self._split)))
        elif type(index) is int and 0 <= index < len(bank):
            drawn = bank[index]
        else:
            raise ValueError(f"level_index must be a whole number from 0 to {len(bank) - 1}, not {index!r}")
        self._source = {"file": drawn.file, "number": drawn.entry.number, "title": drawn.entry.title}
        return drawn.level

    def apply_action(self, action: int) -> Move:
        before = self._level
        self._level = before.moved(action)
        if self._level is not before:
            self._text = self._level.to_xsb()
        if self._planned_for is before and self._plan and self._plan[0] == action:
            self._plan, self._planned_for = self._plan[1:], self._level
        return self._reward()

    def idle_reward(self) -> float:
        return self._reward().reward

    def _reward(self) -> Move:
        count = self._level.on_target()
        reward = _STEP
        if count != self._on_target:
            reward += _BOX_ON if count > self._on_target else _BOX_OFF
        self._on_target = count
        if self._level.solved:
            return Move(reward + _SOLVED, True, True)
        return Move(reward, False, False)

    def draw_board(self) -> str:
        return self._text.translate(self._symbols)

    def state_info(self) -> dict[str, Any]:
        facts: dict[str, Any] = {"anchor": self._text, "state": {"level": self._text}}
        if self._source is not None:
            facts["level_source"] = dict(self._source)
        if self._shows_dead_squares:
            room = self._level.room
            alive = push_distances(room)
            facts["dead_squares"] = [cell for cell in room.floor if cell not in alive]
        return facts

    def describe_rules(self) -> str:
        board = f"drawn row by row: {self._symbols_explained()}"
        if self._shape is not None:
            board = (
                "seen from above: the blue square is you, grey is a wall, brown is a box, pink is a target, green is a "
                "box on a target, white is floor"
            )
        return (
            f"You play Sokoban on a board {board}. Push every box onto a target. Walk into a box to "
            "push it; you cannot pull, and cannot push two boxes at once."
        )

    def _symbols_explained(self) -> str:
        return ", ".join(
            f"{self._legend[symbol].replace(' ', 'a space')} is {meaning}"
            for symbol, meaning in _MEANINGS.items()
        )

    def optimal_steps(self) -> int | None:
        if self._known_optimum is None and self._searched_optimum:
            plan = self._solution()
            self._known_optimum = len(plan) if plan is not None else None
        return self._known_optimum

    def expert_action(self) -> int:
        plan = self._solution()
        return plan[0] if plan else 0

    def _solution(self) -> list[int] | None:
        """Return a shortest solution from here; None if there is none, or it is too far to find."""
        if self._unsolved is self._level:
            return None
        if self._planned_for is not self._level:
            try:
                plan = solve(self._level, _MAX_STATES)
            except SearchLimitError:
                plan = None
            if plan is None:
                self._unsolved = self._level
                return None
            self._plan, self._planned_for = plan, self._level
        return self._plan

    def draw_picture(self, cell: int) -> NDArray[np.uint8]:
        rows = [[_COLOURS[symbol] for symbol in row] for row in self._text.split("\n")]
        picture = np.asarray(rows, dtype=np.uint8).repeat(cell, axis=0).repeat(cell, axis=1)
        # What the player stands on is seen around it.
        top, left = (part * cell + cell // 4 for part in divmod(self._level.player, self._level.room.width))
        picture[top : top + cell // 2, left : left + cell // 2] = _PLAYER
        return picture
