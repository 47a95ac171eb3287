"""A process that is killed at a chosen point of its work."""

import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

_OPERATIONS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "fsync"}
"""What changes files, as audit hooks are told of it, and what brings it to disk."""


def killed_at(point: int, work: Callable[[], object]) -> bool:
    """Run `work` in a copy of this process that is killed just before one of its operations on files.

    Args:
        point: Which operation, from 0 on.
        work: What is cut off.

    Returns:
        Whether it was killed; if not, it had ended before that operation.
    """
    child = os.fork()
    if child == 0:
        _work_until(point, work)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the work failed by itself"
    return os.WIFSIGNALED(status)


def _work_until(point: int, work: Callable[[], object]) -> NoReturn:
    left = point
    fsync = os.fsync

    def on_audit(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal left
        if event in _OPERATIONS:
            left -= 1
            if left == -1:
                os.kill(os.getpid(), signal.SIGKILL)

    def counted_fsync(descriptor: int) -> None:
        on_audit("fsync", ())
        fsync(descriptor)

    code = 1
    try:
        os.fsync = counted_fsync  # Python tells no hook of it
        sys.addaudithook(on_audit)
        work()
        code = 0
    finally:
        os._exit(code)
