"""Episodes on disk, one a line: read to be played again, written as they are played."""

import json
from pathlib import Path
from types import TracebackType
from typing import Self

from pydantic import BaseModel, Field, ValidationError

from trainer.core.errors import ConfigError
from trainer.records.trajectory import Trajectory
from trainer.tasks.task import Task


class _Turn(BaseModel):
    reply: str


class _Episode(BaseModel):
    task: Task
    turns: list[_Turn] = Field(min_length=1)


def read_recording(path: Path) -> list[tuple[Task, list[str]]]:
    """Return the task and the replies of each episode in `path`.

    Raises:
        ConfigError: If the file cannot be read, or a line of it is not an episode.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(
            f"cannot read --recorded {path}: {reason}; name a run's episodes.jsonl, or what rollout --output wrote"
        ) from error
    if not lines:
        raise ConfigError(f"--recorded {path} holds no episodes")
    episodes = [_parsed(path, number, line) for number, line in enumerate(lines, start=1)]
    return [(episode.task, [turn.reply for turn in episode.turns]) for episode in episodes]


def _parsed(path: Path, number: int, line: str) -> _Episode:
    try:
        return _Episode.model_validate_json(line)
    except ValidationError as error:
        problem = error.errors()[0]
        reason = ": ".join([*(str(part) for part in problem["loc"]), problem["msg"]])
        raise ConfigError(
            f"--recorded {path}, line {number} is not an episode: {reason}; name a run's episodes.jsonl, or what "
            "rollout --output wrote"
        ) from error


class EpisodeWriter:
    """Writes episodes to a file, each at once, so that those before a mistake are kept.

    Args:
        path: The file; what it held is replaced.

    Raises:
        ConfigError: If it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("w", encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"cannot write --output {path}: {error.strerror}; name a file in a directory that exists"
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def write(self, trajectory: Trajectory) -> None:
        """Write an episode that is over."""
        self._file.write(json.dumps(trajectory.as_text(), ensure_ascii=False) + "\n")
        self._file.flush()
