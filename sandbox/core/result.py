"""The result of a run: its outcome, as one of a few words, and the guarantees of its isolation."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal


class Outcome(StrEnum):
    """How a run ended. Only `SANDBOX_ERROR` is a fault of the sandbox, and says nothing about the program."""

    OK = "ok"
    NON_ZERO_EXIT = "non_zero_exit"
    TIME_LIMIT = "time_limit"
    MEMORY_LIMIT = "memory_limit"
    OUTPUT_LIMIT = "output_limit"
    DISK_LIMIT = "disk_limit"
    PIDS_LIMIT = "pids_limit"
    COMPILE_ERROR = "compile_error"
    SANDBOX_ERROR = "sandbox_error"


@dataclass(frozen=True, slots=True)
class Guarantees:
    """The guarantees of a back-end, as its probe has verified them on this machine.

    Attributes:
        backend: Its name.
        level: From the strongest to none: a hypervisor or container, namespaces, Landlock, nothing.
        files: The program sees no file of the host but the read-only system.
        network: The program reaches no network.
        processes: The program sees and signals no process but its own, and none of them outlives the run.
        privileges: The program has no capability and gains none.
        system_calls: Rare and dangerous system calls are refused.
        memory: Whether the limit is kept for the sum of the processes by the kernel or by a watcher, or for each.
        disk: The sum of the files is bounded.
        fresh: Every run starts from nothing; False if runs share a warm sandbox.
    """

    backend: str
    level: Literal["container", "namespaces", "landlock", "none"]
    files: bool
    network: bool
    processes: bool
    privileges: bool
    system_calls: bool
    memory: Literal["sum", "watched", "each", "none"]
    disk: bool
    fresh: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """The result of a run.

    Attributes:
        outcome: How it ended.
        exit_code: The program's exit code; None if a signal or the sandbox ended it.
        signal: The signal that ended it; None if none did.
        stdout: Its standard output, cut at the limit.
        stderr: Its standard error, cut likewise.
        stdout_truncated: Whether something was cut.
        stderr_truncated: The same.
        wall_seconds: From start to end, without the sandbox's own preparation.
        cpu_seconds: User and system time of all its processes, as far as they are known.
        peak_memory_mb: Most memory at one time, in MiB, as far as it is known.
        files: The collected files by their names; those that were missing, too large or not plain files are absent.
        detail: A sentence for people, if the outcome is not `ok`.
        compiling: How the compiler ended; None if no compiler ran.
        guarantees: The guarantees of the isolation; None if nothing ran.
    """

    outcome: Outcome
    exit_code: int | None = None
    signal: int | None = None
    stdout: bytes = b""
    stderr: bytes = b""
    stdout_truncated: bool = False
    stderr_truncated: bool = False
    wall_seconds: float = 0.0
    cpu_seconds: float = 0.0
    peak_memory_mb: float = 0.0
    files: Mapping[str, bytes] = field(default_factory=dict)
    detail: str = ""
    compiling: "RunResult | None" = None
    guarantees: Guarantees | None = None
