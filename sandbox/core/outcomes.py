"""Classification of runs: the one place that turns their bare facts into an outcome."""

import signal
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from rollgym.sandbox.core.base import Outcome
from rollgym.sandbox.core.limits import Limits

Stop = Literal["time", "output", "memory", "pids", "disk"]

_MEMORY_COMPLAINTS = (b"MemoryError", b"std::bad_alloc", b"Cannot allocate memory", b"cannot allocate memory")
_PIDS_COMPLAINTS = (b"Resource temporarily unavailable", b"can't start new thread")
_DISK_COMPLAINTS = (b"No space left on device", b"File too large")
_COMPLAINT_BYTES = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The observations of a back-end about a program that has ended.

    Attributes:
        exit_code: None if a signal ended it, or if it is not known how it ended.
        signal: None if none ended it.
        stopped_for: Why the sandbox ended it; None if it did not.
        memory_exhausted: Whether the kernel killed a process because memory was exhausted.
        disk_full: Whether no room was left in the end.
        pids_refused: Whether a process was refused for their number.
        cpu_seconds: Of all processes.
        stderr: The end of its standard error.
    """

    exit_code: int | None = None
    signal: int | None = None
    stopped_for: Stop | None = None
    memory_exhausted: bool = False
    disk_full: bool = False
    pids_refused: bool = False
    cpu_seconds: float = 0.0
    stderr: bytes = b""


def classify(facts: Facts, limits: Limits) -> tuple[Outcome, str]:
    """Return the outcome, and a sentence for people if it is not `ok`.

    Actions of the kernel or the sandbox are certain. If a program ends with an error by itself, its output is searched
    for the cause; the output can only turn one kind of failure into another.
    """
    if facts.stopped_for == "time":
        return Outcome.TIME_LIMIT, f"it ran longer than {limits.wall_seconds:g} s"
    if facts.stopped_for == "output":
        return Outcome.OUTPUT_LIMIT, "it wrote far more than is kept"
    if facts.stopped_for == "memory" or facts.memory_exhausted:
        return Outcome.MEMORY_LIMIT, f"it needed more than {limits.memory_mb} MiB of memory"
    if facts.stopped_for == "disk":
        return Outcome.DISK_LIMIT, _disk(limits)
    if facts.stopped_for == "pids":
        return Outcome.PIDS_LIMIT, _pids(limits)
    if facts.exit_code == 0:
        return Outcome.OK, ""
    cpu_limit = limits.cpu_seconds or limits.wall_seconds
    if facts.signal == signal.SIGXCPU or (facts.signal == signal.SIGKILL and facts.cpu_seconds >= cpu_limit):
        return Outcome.TIME_LIMIT, f"it used more than {cpu_limit:g} s of CPU time"
    if facts.signal == signal.SIGXFSZ or facts.disk_full or _complains(facts, _DISK_COMPLAINTS):
        return Outcome.DISK_LIMIT, _disk(limits)
    if facts.pids_refused or _complains(facts, _PIDS_COMPLAINTS):
        return Outcome.PIDS_LIMIT, _pids(limits)
    if _complains(facts, _MEMORY_COMPLAINTS):
        return Outcome.MEMORY_LIMIT, f"it was refused memory beyond {limits.memory_mb} MiB"
    if facts.signal is not None:
        return Outcome.NON_ZERO_EXIT, f"signal {facts.signal} ({_signal_name(facts.signal)}) ended it"
    return Outcome.NON_ZERO_EXIT, f"it ended with exit code {facts.exit_code}"


def _complains(facts: Facts, complaints: Iterable[bytes]) -> bool:
    return any(complaint in facts.stderr[-_COMPLAINT_BYTES:] for complaint in complaints)


def _pids(limits: Limits) -> str:
    return f"it asked for more than {limits.pids} processes"


def _disk(limits: Limits) -> str:
    return f"it wrote more than {limits.disk_mb} MiB or {limits.inodes} files"


def _signal_name(number: int) -> str:
    return signal.strsignal(number) or "unknown"
