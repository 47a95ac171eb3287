"""Level files: Boxoban's, collections in XSB and SOK, run-length encoded levels, and boards in RAGEN's symbols.

A board is a block of lines with walls in them. Whatever else stands in a file is a comment or a heading; the last
heading before a board is its title, and so is a `Title:` below it.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from rollgym.envs.core.splits import Split
from rollgym.envs.games.sokoban.board import Level, is_bordered, is_enclosed, parse_level, push_distances
from rollgym.envs.games.sokoban.generator import split_of

_SUFFIXES = frozenset({".txt", ".xsb", ".sok"})
"""Suffixes of level files in a directory."""

_SYMBOLS = frozenset("#@+$*._- ")
_RAGEN = str.maketrans({"P": "@", "S": "+", "X": "$", "√": "*", "O": ".", "_": " ", "-": " "})
_PLAIN = _SYMBOLS | frozenset("PSX√O")
_RUNS = re.compile(r"(?:\d{0,4}[#@+$*.\-_ PSX√O|()])+")
_RUN = re.compile(r"(\d+)([^\d()])")
_GROUP = re.compile(r"(\d*)\(([^()]*)\)")
_KEY = re.compile(r"([A-Za-z][A-Za-z _-]*):\s*(.*)")
_COMMENT_END = re.compile(r"comment[-_ ]?end", re.IGNORECASE)
_LARGEST = 100
_LONGEST = 2 * _LARGEST * _LARGEST
_TOO_LONG = f"has runs of more than {_LONGEST} cells: shorten them"
_MOST_ERRORS = 5


class LevelFileError(ValueError):
    """A level file that cannot be used; the message names file, level and remedy."""


@dataclass(frozen=True, slots=True)
class FileLevel:
    """A level as it stands in a file.

    Attributes:
        number: Its place in the file, from 1.
        title: Its name in the file; None if it has no name.
        text: The board as XSB text, closed by walls on every edge.
    """

    number: int
    title: str | None
    text: str


@dataclass(slots=True)
class _Block:
    """The lines of one level as they stand in a file."""

    line: int
    lines: list[str]
    title: str | None
    titled: bool = False


def read_levels(path: Path) -> list[FileLevel]:
    """Read a level file.

    Raises:
        LevelFileError: It cannot be read, holds no level, or has a malformed one.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise LevelFileError(f"cannot read {path}: {error.strerror}") from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        # Old collections have authors with accents in Latin-1; boards are ASCII in both.
        text = data.decode("latin-1")
    return parse_levels(text, str(path))


def parse_levels(text: str, source: str = "the text") -> list[FileLevel]:
    """Read levels from the text of a level file.

    Args:
        text: The file's content.
        source: Its name, for messages.

    Raises:
        LevelFileError: It has no level, or a malformed one.
    """
    levels: list[FileLevel] = []
    errors: list[str] = []
    for number, block in enumerate(_blocks(text, source), 1):
        try:
            levels.append(FileLevel(number, block.title, _checked(block.lines)))
        except ValueError as error:
            name = "" if block.title is None else f" {block.title!r}"
            errors.append(f"level {number}{name} at line {block.line} of {source} {error}")
    if errors:
        more = f"\nand {len(errors) - _MOST_ERRORS} more" if len(errors) > _MOST_ERRORS else ""
        raise LevelFileError("\n".join(errors[:_MOST_ERRORS]) + more)
    if not levels:
        raise LevelFileError(
            f"{source} holds no level: a board is lines of '#@+$*. ', with walls (#) in each"
        )
    return levels


def _blocks(text: str, source: str) -> list[_Block]:
    """Split a file into the lines of its levels."""
    blocks: list[_Block] = []
    heading: str | None = None
    comment = 0
    within = continued = titled = False
    for number, line in enumerate(text.splitlines(), 1):
        bare = line.strip()
        if comment:
            comment = 0 if _COMMENT_END.match(bare) else comment
        elif _is_board(line, within=within):
            # A line with row ends in it is a level of its own, unless the one before promised more.
            if not within or ("|" in line and not continued):
                blocks.append(_Block(number, [], heading, titled))
                heading, titled = None, False
            blocks[-1].lines.append(line.rstrip())
            within, continued = True, bare.endswith("|")
        else:
            within = False
            key = _KEY.fullmatch(bare)
            if key is None:
                name = bare.lstrip(";/").strip().strip("'")
                # A line of dashes between levels names none of them.
                heading = name if any(map(str.isalnum, name)) else heading
            elif key[1].lower() == "title" and blocks and heading is None and not blocks[-1].titled:
                blocks[-1].title, blocks[-1].titled = key[2] or None, True
            elif key[1].lower() == "title":
                heading, titled = key[2] or heading, True
            elif key[1].lower() == "comment" and not key[2]:
                comment = number
    if comment:
        raise LevelFileError(
            f"the comment at line {comment} of {source} does not end: close it with 'Comment-End:'"
        )
    return blocks


def _is_board(line: str, *, within: bool) -> bool:
    """Return whether a line is part of a board; `within` says that the line before it was."""
    symbols = set(line)
    if "#" not in symbols:
        return within and symbols <= _SYMBOLS and not line.isspace() and line != ""
    if symbols <= _PLAIN or _RUNS.fullmatch(line.strip(" ")):
        return True
    bare = line.strip()
    # A row with a typing error is not a heading; reading it as a level then reports the error.
    return within and len(bare) > 1 and bare[0] == bare[-1] == "#"


def _checked(lines: list[str]) -> str:
    """Return the board that lines describe as XSB text; the error completes the sentence 'level 1 ...'."""
    rows = _trimmed([row for line in lines for row in _expanded(line)])
    strange = sorted(set("".join(rows)) - _SYMBOLS)
    if strange:
        raise ValueError(
            f"has {', '.join(map(repr, strange))} on its board: boards are drawn with '#@+$*. ' only"
        )
    width = max(len(row) for row in rows)
    if len(rows) > _LARGEST or width > _LARGEST:
        raise ValueError(f"has {len(rows)} rows and {width} columns: {_LARGEST} of each are the most")
    cells = "".join(rows)
    players = cells.count("@") + cells.count("+")
    if players == 0:
        raise ValueError("has no player: mark its cell with @, or with + on a target")
    if players > 1:
        raise ValueError(f"has {players} players: leave one of them")
    boxes = cells.count("$") + cells.count("*")
    targets = cells.count(".") + cells.count("+") + cells.count("*")
    if boxes != targets:
        raise ValueError(f"has {boxes} boxes ($ and *) and {targets} targets (., + and *): make them as many")
    if "$" not in cells:
        raise ValueError(
            "has no box to push: remove it from the file" if boxes else "has no box: draw one with $"
        )
    if not is_enclosed(rows):
        raise ValueError("has walls that do not close, so one could leave the board: complete them with #")
    level = parse_level("\n".join(rows))
    alive = push_distances(level.room)
    for box in sorted(level.boxes - alive.keys()):
        row, column = divmod(box, level.room.width)
        raise ValueError(
            f"cannot be solved, for the box in row {row + 1}, column {column + 1} never gets to a target: "
            "move it, or remove the level from the file"
        )
    return "\n".join(rows) if is_bordered(rows) else level.to_xsb()


def _expanded(line: str) -> list[str]:
    """Return the rows of a line, its runs written out."""
    if set(line) <= _PLAIN or not _RUNS.fullmatch(line.strip(" ")):
        return [line]
    text = line.strip(" ")
    while "(" in text or ")" in text:
        opened = _GROUP.sub(lambda group: group[2] * int(group[1] or 1), text)
        if opened == text or len(opened) > _LONGEST:
            raise ValueError("has parentheses that do not close" if opened == text else _TOO_LONG)
        text = opened
    if sum(int(run[1]) for run in _RUN.finditer(text)) > _LONGEST:
        raise ValueError(_TOO_LONG)
    text = _RUN.sub(lambda run: run[2] * int(run[1]), text)
    return [row for row in text.split("|") if row]


def _trimmed(rows: list[str]) -> list[str]:
    """Return rows in XSB without the empty margin."""
    rows = [row.translate(_RAGEN).rstrip(" ") for row in rows]
    while rows and not rows[-1]:
        rows.pop()
    while rows and not rows[0]:
        rows.pop(0)
    margin = min((len(row) - len(row.lstrip(" ")) for row in rows if row), default=0)
    return [row[margin:] for row in rows]


_DRAWS = 100


@dataclass(frozen=True, slots=True)
class BankLevel:
    """A level of a bank.

    Attributes:
        file: The name of its file, without the directories above the bank.
        entry: The level as it stands there.
        level: The level itself.
    """

    file: str
    entry: FileLevel
    level: Level


class LevelBank:
    """All levels of a file, or of the level files in a directory and below it, in the order of their names.

    Args:
        files: Levels by the name of their file.
        source: Their origin, for messages.
    """

    def __init__(self, files: dict[str, list[FileLevel]], source: str) -> None:
        self._names = tuple(files)
        self._levels = tuple(files.values())
        # Level i is in the file whose end is the first one beyond i.
        self._ends = np.cumsum([len(levels) for levels in self._levels])
        self._source = source

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> BankLevel:
        if not 0 <= index < len(self):
            raise IndexError(f"{self._source} has {len(self)} levels, so there is no level {index}")
        file = int(np.searchsorted(self._ends, index, side="right"))
        entry = self._levels[file][index - int(self._ends[file])]
        return BankLevel(self._names[file], entry, parse_level(entry.text))

    def draw(self, generator: np.random.Generator, split: Split | None) -> BankLevel:
        """Draw a level of a split, each as likely as any other.

        Raises:
            LevelFileError: If the split has none.
        """
        for _ in range(_DRAWS):
            drawn = self[int(generator.integers(len(self)))]
            if split is None or split_of(drawn.level) == split:
                return drawn
        # The split is rare or empty here. Splits go by content alone, so that which it is takes a look at each.
        members = [index for index in range(len(self)) if split_of(self[index].level) == split]
        if not members:
            raise LevelFileError(
                f"none of the {len(self)} levels of {self._source} is of split {split!r}: splits go by the content of "
                "levels, so add levels, or ask for split null to draw from all"
            )
        return self[members[int(generator.integers(len(members)))]]


@lru_cache(maxsize=8)
def load_bank(path: str) -> LevelBank:
    """Read a level file, or all those of a directory; each process reads it once.

    Args:
        path: The file or directory.

    Raises:
        LevelFileError: If the path does not exist, has no level, or a level is malformed.
    """
    place = Path(path)
    if not place.exists():
        raise LevelFileError(f"there is no file or directory {path}")
    if not place.is_dir():
        return LevelBank({place.name: read_levels(place)}, path)
    found = sorted(each for each in place.rglob("*") if each.suffix.lower() in _SUFFIXES and each.is_file())
    if not found:
        raise LevelFileError(
            f"there is no level file in {path}: they are called {', '.join(sorted(_SUFFIXES))}"
        )
    return LevelBank({each.relative_to(place).as_posix(): read_levels(each) for each in found}, path)
