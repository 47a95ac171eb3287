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
def run_lock(directory: Path) -> Iterator[None]:
    """Hold a directory for this process while the context is open.

    Raises:
        ConfigError: If another process holds it, or the directory cannot be written.
    """
    path = directory / LOCK_FILE
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ConfigError(
            f"cannot write to output_dir {directory}: {error.strerror}; name another output_dir"
        ) from error
    try:
        _lock(descriptor, directory)
        try:
            _sign(descriptor)
            yield
        finally:
            os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, directory: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise ConfigError(
                f"output_dir {directory} is in use by {_holder(descriptor)}: wait for it or end it, or name another "
                "output_dir"
            ) from error
        raise ConfigError(
            f"cannot lock output_dir {directory}: {error.strerror}; name one on a file system that knows locks"
        ) from error


def _sign(descriptor: int) -> None:
    """Write who holds the lock, for the message of whoever comes next."""
    holder = json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode()
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, holder, 0)
    except OSError as error:
        raise ConfigError(f"cannot write to output_dir: {error.strerror}; name another output_dir") from error


def _holder(descriptor: int) -> str:
    try:
        holder = json.loads(os.pread(descriptor, 4096, 0))
        return f"process {int(holder['pid'])} on {holder['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"  # which has not signed yet, or could not
