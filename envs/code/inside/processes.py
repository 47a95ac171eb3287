"""What a server does with its own process, and with those that programs leave behind."""

import contextlib
import ctypes
import os
import resource
import signal
from collections.abc import Collection

SET_DUMPABLE, SET_CHILD_SUBREAPER = 4, 36


def silence(*descriptors: int) -> None:
    """Turn descriptors to where nothing is read and nothing kept."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in descriptors:
        os.dup2(nothing, descriptor)
    os.close(nothing)


def control(option: int, value: int) -> None:
    """Set a property of this process, where the system has it."""
    with contextlib.suppress(OSError, AttributeError, ValueError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def high(descriptor: int) -> int:
    """Return a copy of a descriptor with a high number, in its place."""
    # Out of the way of programs that close or count the low ones.
    limit = min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 4096)
    for number in range(limit - 1, limit - 32, -1):
        try:
            os.fstat(number)
        except OSError:
            os.dup2(descriptor, number, inheritable=False)
            os.close(descriptor)
            return number
    return descriptor


def end_orphans(spared: Collection[int]) -> None:
    """Kill what programs have started beside themselves: it is handed to this process when its parent ends.

    Args:
        spared: Children that are kept.
    """
    while True:
        if not spared:
            try:
                os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                # The common case, without a look at every process.
                return
        orphans = [pid for pid in _children() if pid not in spared]
        if not orphans:
            return
        for pid in orphans:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def remove(directory: str) -> None:
    """Remove a directory with whatever is in it."""
    try:
        os.rmdir(directory)
    except OSError:
        # Only here: the import takes long, and hardly any program leaves files.
        import shutil

        shutil.rmtree(directory, ignore_errors=True)


def _children() -> list[int]:
    mine = os.getpid()
    found: list[int] = []
    try:
        names = os.listdir("/proc")
    except OSError:
        # Then the end of the run ends them.
        return found
    for name in names:
        if name.isdigit():
            with (
                contextlib.suppress(OSError, ValueError, IndexError),
                open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file,
            ):
                if int(file.read().rpartition(")")[2].split()[1]) == mine:
                    found.append(int(name))
    return found
