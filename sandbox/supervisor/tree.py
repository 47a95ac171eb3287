"""The processes below one, as /proc shows them: for back-ends, and machines, without control groups."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TreeUsage:
    """The usage of the processes below one.

    Attributes:
        processes: How many there are.
        tasks: How many threads they have in all.
        memory_bytes: Their memory, with shared pages counted once; 0 for a single process, which has a limit of its
            own.
    """

    processes: int
    tasks: int
    memory_bytes: int


def descendants(pid: int) -> list[int]:
    """Return the processes below one, parents before children."""
    found: list[int] = []
    waiting = [pid]
    while waiting:
        for child in _children(waiting.pop()):
            found.append(child)
            waiting.append(child)
    return found


def usage(pid: int) -> TreeUsage:
    """Measure the processes below one."""
    below = descendants(pid)
    tasks = 0
    for one in below:
        with contextlib.suppress(OSError):
            tasks += len(os.listdir(f"/proc/{one}/task"))
    memory = sum(_proportional_bytes(one) for one in below) if len(below) > 1 else 0
    return TreeUsage(len(below), tasks, memory)


def kill_descendants(pid: int) -> bool:
    """Send the signal that cannot be caught to all processes below one; False if there was none."""
    below = [one for one in descendants(pid) if _runs(one)]
    # Stopped first: a process that forks faster than it is found cannot do so while it is stopped.
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for one in below:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(one, number)
    return bool(below)


def kill_all_below(pid: int) -> None:
    """Kill until none is left: when a parent dies, its children become those of the process that adopts orphans."""
    while kill_descendants(pid):
        time.sleep(0.001)  # A signal takes effect in its own time; each round finds missed processes.


def tasks_of_user(uid: int) -> int:
    """Return how many threads a user has."""
    count = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{name}").st_uid == uid:
                    count += len(os.listdir(f"/proc/{name}/task"))
    return count


def _runs(pid: int) -> bool:
    """Whether a process runs, and is not a zombie that waits for its parent."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state = file.read().rpartition(b")")[2].split()[0]
        return state not in (b"Z", b"X") or len(os.listdir(f"/proc/{pid}/task")) > 1
    except OSError:
        return False


def _children(pid: int) -> Iterator[int]:
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{task}/children", "rb") as file:
                yield from (int(child) for child in file.read().split())


def _proportional_bytes(pid: int) -> int:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/smaps_rollup", "rb") as file:
        for line in file:
            if line.startswith(b"Pss:"):
                return int(line.split()[1]) << 10
    return 0
