"""Episodes on disk, one a line: read for replays, written as they are played."""

import json
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from pydantic import BaseModel, Field, ValidationError

from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.core.run_files import write_errors
from rollgym.trainer.core.run_lock import output_lock
from rollgym.trainer.records.schema import EpisodeFormatError
from rollgym.trainer.records.trajectory import Trajectory
from rollgym.trainer.tasks.task import Task


class _Turn(BaseModel):
    reply: str


class _EarlierEpisode(BaseModel):
    """The parts of an earlier release's episode that a replay needs."""

    task: Task
    turns: list[_Turn] = Field(min_length=1, fail_fast=True)


def read_recording(path: Path) -> list[tuple[Task, list[str]]]:
    """Return the task and the replies of each episode in `path`.

    Raises:
        ConfigError: If the file cannot be read, or a line of it is not an episode.
    """
    episodes = []
    try:
        with path.open("rb") as lines:
            episodes = [_script(path, number, line) for number, line in enumerate(lines, start=1)]
    except OSError as error:
        raise ConfigError(
            f"cannot read --recorded {path}: {error.strerror}; name a run's episodes.jsonl, or what rollout --output "
            "wrote"
        ) from error
    if not episodes:
        raise ConfigError(f"--recorded {path} holds no episodes")
    return episodes


def _script(path: Path, number: int, line: bytes) -> tuple[Task, list[str]]:
    try:
        record = json.loads(line)
        if isinstance(record, dict) and "format" not in record:
            episode = _EarlierEpisode.model_validate(record)
            return episode.task, [turn.reply for turn in episode.turns]
        trajectory = Trajectory.from_record(record)
        if not trajectory.steps:
            raise EpisodeFormatError("turns: it has none")
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"--recorded {path}, line {number} is not an episode: {_reason(error)}; name a run's episodes.jsonl, or "
            "what rollout --output wrote"
        ) from error
    return trajectory.task, [turn.reply for turn in trajectory.steps]


def _reason(error: Exception) -> str:
    if isinstance(error, ValidationError):
        problem = error.errors(include_url=False, include_input=False)[0]
        return ": ".join([*(str(part)[:80] for part in problem["loc"]), problem["msg"]])
    if isinstance(error, EpisodeFormatError):
        return str(error)
    return "Invalid JSON"


class EpisodeWriter:
    """Writes episodes to a file of its own, each at once, so that those before a mistake are kept.

    Args:
        path: The file; its content is replaced.

    Raises:
        ConfigError: If it cannot be written, or another process writes it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with ExitStack() as held:
            held.enter_context(output_lock(path))  # before it is opened, which empties it
            try:
                # Half a surrogate pair has no UTF-8, but this way of writing it is JSON's own.
                self._file = path.open("w", encoding="utf-8", errors="backslashreplace")
            except OSError as error:
                raise ConfigError(
                    f"cannot write --output {path}: {error.strerror}; name a file in a directory that exists"
                ) from error
            self._held = held.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._held, write_errors(self._path):
            self._file.close()

    def write(self, trajectory: Trajectory) -> None:
        """Write an episode that is over.

        Raises:
            WriteError: If that cannot be done, such as on a full disk.
        """
        with write_errors(self._path):
            self._file.write(json.dumps(trajectory.as_record(), ensure_ascii=False) + "\n")
            self._file.flush()
