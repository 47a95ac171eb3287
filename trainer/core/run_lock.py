"""One process at a time writes into a run's directory."""

import errno
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainer.core.errors import ConfigError

LOCK_FILE = "run.lock"
"""The lock's name in a run's directory. The file stays; what counts is the lock on it, which dies with its process."""


@contextmanager
def run_lock(directory: Path, setting: str = "output_dir") -> Iterator[None]:
    """Hold a directory for this process while the context is open.

    Args:
        directory: The directory; it is made if need be.
        setting: What named it; for people.

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


def _lock(descriptor: int, directory: Path, setting: str) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise ConfigError(
                f"{setting} {directory} is in use by {_holder(descriptor)}: wait for it or end it, or name another "
                f"{setting}"
            ) from error
        raise ConfigError(
            f"cannot lock {setting} {directory}: {error.strerror}; name one on a file system that knows locks"
        ) from error


def _sign(descriptor: int, setting: str) -> None:
    """Write who holds the lock, for the message of whoever comes next."""
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
