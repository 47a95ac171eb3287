"""Writes files of a run's directory, and reports errors of the disk."""

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rollgym.trainer.core.errors import TrainerError

CONFIG_FILE = "config.yaml"
"""The resolved settings' name in a run's directory."""


class WriteError(TrainerError):
    """A file of the run cannot be written; the message says which, and why."""


class DamagedFileError(TrainerError):
    """A file of the run has content that no run wrote; the message says where, and how to continue."""

    def __init__(self, path: Path, line: int) -> None:
        super().__init__(
            f"{path} is damaged in line {line}: mend the line, or move the file away, and the run goes on without "
            "the records in it"
        )


@contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Name the file in what goes wrong while it is written.

    Args:
        path: The file or folder that is written inside the context.

    Raises:
        WriteError: In place of every `OSError`, and of errors that libraries derive from one.
    """
    try:
        yield
    except OSError as error:
        raise WriteError(_message(Path(error.filename or path), error)) from error
    except RuntimeError as error:
        # torch and safetensors tell of a file that they could not write in errors of their own.
        cause = _os_error(error)
        if cause is None:
            raise
        raise WriteError(_message(path, cause)) from error


def write_whole(path: Path, text: str) -> None:
    """Replace a file by a text atomically: a reader, also after a kill, finds the old or the new text whole.

    Raises:
        OSError: If it cannot be written.
    """
    scratch = path.with_name(f".{path.name}.partial")
    with scratch.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(path)


def sync_to_disk(path: Path) -> None:
    """Wait until the disk has a file, or the names of a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class LineFile:
    """A file that grows by lines; errors of the disk name the file.

    Args:
        path: Its path; a last line that a crash left incomplete is cut off.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with write_errors(path):
            if path.exists():
                _cut_torn_line(path)
            # Half a surrogate pair has no UTF-8, but this way of writing it is JSON's own.
            self._file = path.open("a", encoding="utf-8", errors="backslashreplace")
        self._failed = False

    def write(self, value: object) -> None:
        """Append a value as a line of JSON; it may stay in memory until `flush`."""
        with self._writing():
            self._file.write(json.dumps(value, ensure_ascii=False) + "\n")

    def flush(self) -> None:
        """Bring what was written to the operating system."""
        with self._writing():
            self._file.flush()

    def truncate(self, size: int) -> None:
        """Truncate the file to its first `size` bytes."""
        with self._writing():
            self._file.flush()
            os.truncate(self._path, size)

    def close(self) -> None:
        """Close the file; lines that could not be written, as reported before, are dropped."""
        if self._failed:
            with suppress(OSError):
                self._file.close()
        else:
            with self._writing():
                self._file.close()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            with write_errors(self._path):
                yield
        except WriteError:
            self._failed = True
            raise


def read_lines(path: Path, number: str | None = None) -> list[dict[str, Any]]:
    """Read a file of JSON lines.

    Args:
        path: The file.
        number: The key of an integer that every line has.

    Raises:
        DamagedFileError: If a line was not written by a run.
    """
    return [line for line, _ in lines_and_sizes(path, number)]


def lines_and_sizes(path: Path, number: str | None = None) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield the lines of a file as `read_lines` has them, each with its size in bytes."""
    with path.open("rb") as lines:
        for line_number, line in enumerate(lines, start=1):
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DamagedFileError(path, line_number) from error
            if not isinstance(value, dict) or not (number is None or isinstance(value.get(number), int)):
                raise DamagedFileError(path, line_number)
            yield value, len(line)


def _cut_torn_line(path: Path) -> None:
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(path, whole)


def _os_error(error: BaseException | None) -> OSError | None:
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def _message(path: Path, error: OSError) -> str:
    reason = os.strerror(error.errno) if error.errno else str(error)
    remedy = {errno.ENOSPC: ": free space there", errno.EDQUOT: ": free space there"}.get(
        error.errno or 0, ""
    )
    return f"cannot write {path}: {reason}{remedy}"
