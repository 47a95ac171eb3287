"""One process at a time writes into a run's directory, or into a command's output."""

import errno
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rollgym.trainer.core.errors import ConfigError

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
def output_lock(path: Path, option: str = "--output") -> Iterator[None]:
    """Lock a command's output for this process while the context is open, and leave no file beside it.

    A path that is neither file nor folder, such as a terminal or `/dev/null`, is not locked.

    Args:
        path: A file, which is created if missing, or an existing folder.
        option: The option that named the path; for people.

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
            f"cannot write {option} {path}: {error.strerror}; name a file in a directory that exists"
        ) from error
    try:
        _lock(descriptor, path, option)
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
