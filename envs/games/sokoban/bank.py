"""Handmade levels, drawn by seed like generated ones."""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from rollgym.envs.core.splits import Split
from rollgym.envs.games.sokoban.board import Level, parse_level
from rollgym.envs.games.sokoban.generator import split_of
from rollgym.envs.games.sokoban.levels import SUFFIXES, FileLevel, LevelFileError, read_levels

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
    found = sorted(each for each in place.rglob("*") if each.suffix.lower() in SUFFIXES and each.is_file())
    if not found:
        raise LevelFileError(
            f"there is no level file in {path}: they are called {', '.join(sorted(SUFFIXES))}"
        )
    return LevelBank({each.relative_to(place).as_posix(): read_levels(each) for each in found}, path)
