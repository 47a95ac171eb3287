"""The interface of every sandbox: run a program once, or hold an interactive session with it.

A program is source text in a language. The result of a run has its outcome, as one of a few words, and the guarantees
of its isolation. A run whose caller has left can be cancelled.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, Protocol, get_args

from rollgym.sandbox.core.limits import DEFAULT_LIMITS, Limits

Language = Literal["python", "bash", "cpp"]
LANGUAGES: tuple[Language, ...] = get_args(Language)

Level = Literal["container", "namespaces", "landlock", "none"]
LEVELS: tuple[Level, ...] = get_args(Level)
"""From the strongest to none."""


@dataclass(frozen=True, slots=True)
class Program:
    """A program as source text.

    Attributes:
        language: Its language; compiled languages are compiled inside the sandbox, too.
        source: The text of its one file.
        arguments: Words of its command line.
    """

    language: Language
    source: str
    arguments: tuple[str, ...] = ()


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
    level: Level
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


class SandboxSession(Protocol):
    """An interactive session: a process that is written to and read from until it is closed or ends."""

    def write(self, data: bytes) -> None:
        """Write to the program's standard input.

        Raises:
            BrokenPipeError: If it has ended.
        """

    def read(self, timeout_seconds: float) -> bytes:
        """Return new output as soon as there is some; empty at the end or at the time-out."""

    @property
    def alive(self) -> bool:
        """Whether the program is still running."""

    def close(self) -> RunResult:
        """End the program, and everything that it started; return its result."""


class Sandbox(Protocol):
    """A back-end. Any thread may call it at any time; runs know nothing of each other."""

    name: str

    def probe(self) -> Guarantees:
        """Run a control program and an attempt to escape, and return the verified guarantees.

        Raises:
            SandboxUnavailableError: If it does not work on this machine, with the reason and the remedy.
        """

    def run(
        self,
        program: Program,
        *,
        files: Mapping[str, bytes] = {},
        stdin: bytes = b"",
        limits: Limits = DEFAULT_LIMITS,
        collect: Iterable[str] = (),
    ) -> RunResult:
        """Run a program to its end.

        Args:
            program: The program to run.
            files: Files for its working directory, by relative path.
            stdin: Its standard input.
            limits: Its resource limits.
            collect: Relative paths of files to bring back. Links, pipes and files larger than the limit of the output
                are not collected.
        """

    def open_session(
        self, program: Program, *, files: Mapping[str, bytes] = {}, limits: Limits = DEFAULT_LIMITS
    ) -> SandboxSession:
        """Start an interactive session with a program; `wall_seconds` bounds all of it."""

    def close(self) -> None:
        """End all processes that are kept warm."""


class SandboxUnavailableError(RuntimeError):
    """A back-end does not work here, and nothing weaker takes its place."""


class Cancellation:
    """Says, from any thread, that a run is to end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cancelled = False
        self._call: Callable[[], None] | None = None

    def cancel(self) -> None:
        """End the run, or the one that is still to begin."""
        with self._lock:
            self._cancelled = True
            if self._call is not None:
                self._call()

    @contextmanager
    def calling(self, call: Callable[[], None]) -> Iterator[None]:
        """Register the function that ends the run for this context; call it at once if the run was cancelled."""
        with self._lock:
            self._call = call
            if self._cancelled:
                call()
        try:
            yield
        finally:
            with self._lock:
                self._call = None


class CancellableSandbox(Sandbox, Protocol):
    """A back-end of this machine."""

    def run(
        self,
        program: Program,
        *,
        files: Mapping[str, bytes] = {},
        stdin: bytes = b"",
        limits: Limits = DEFAULT_LIMITS,
        collect: Iterable[str] = (),
        cancellation: Cancellation | None = None,
    ) -> RunResult:
        """Run a program to its end, or until it is cancelled; the result is then meaningless."""
