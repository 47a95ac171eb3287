"""Writes files of a run's directory, reports errors of the disk, and lets one process at a time write into it."""

import errno
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rollgym.trainer.core.errors import ConfigError, TrainerError

CONFIG_FILE = "config.yaml"
"""The resolved settings' name in a run's directory."""
MODEL_FOLDER = "model"
"""Name of the trained model in a run's directory, if all of it was trained."""
ADAPTER_FOLDER = "adapter"
"""Name of the trained adapters in a run's directory, if only those were trained."""


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


def has_ended(directory: Path) -> bool:
    """Whether a run has come to its last step: then it has written what it trained."""
    return any((directory / name).is_dir() for name in (MODEL_FOLDER, ADAPTER_FOLDER))


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


LOCK_FILE = "run.lock"
"""The lock's name in a run's directory. The file stays; what counts is the lock on it, which dies with its process."""


@contextmanager
def run_lock(directory: Path, setting: str = "output_dir") -> Iterator[None]:
    """Hold a directory for this process while the context is open.

    Args:
        directory: The directory; created if missing.
        setting: The setting that named the path; for people.

    Raises:
        ConfigError: If another process holds it, or the directory cannot be written.
    """
    path = directory / LOCK_FILE
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ConfigError(
            f"cannot write to {setting} {directory}: {error.strerror}; name another {setting}"
        ) from error
    try:
        _lock(descriptor, directory, setting)
        try:
            _sign(descriptor, setting)
            yield
        finally:
            os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


@contextmanager
def output_lock(path: Path) -> Iterator[None]:
    """Lock a command's output for this process while the context is open, and leave no file beside it.

    A path that is neither file nor folder, such as a terminal or `/dev/null`, is not locked.

    Args:
        path: A file, which is created if missing, or an existing folder.

    Raises:
        ConfigError: If another process holds it, or it cannot be written.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        yield
        return
    try:
        # The lock is on the output itself: a reader of the records or the model finds no further file.
        descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_WRONLY | os.O_CREAT, 0o644)
    except OSError as error:
        raise ConfigError(
            f"cannot write --output {path}: {error.strerror}; name a file in a directory that exists"
        ) from error
    try:
        _lock(descriptor, path, "--output")
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, path: Path, setting: str) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise ConfigError(
                f"{setting} {path} is in use by {_holder(descriptor)}: wait for it or end it, or name another "
                f"{setting}"
            ) from error
        raise ConfigError(
            f"cannot lock {setting} {path}: {error.strerror}; name one on a file system that knows locks"
        ) from error


def _sign(descriptor: int, setting: str) -> None:
    """Write who holds the lock, for the error message of the next process."""
    holder = json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode()
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, holder, 0)
    except OSError as error:
        raise ConfigError(f"cannot write to {setting}: {error.strerror}; name another {setting}") from error


def _holder(descriptor: int) -> str:
    try:
        holder = json.loads(os.pread(descriptor, 4096, 0))
        return f"process {int(holder['pid'])} on {holder['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"  # which has not signed yet, or could not
