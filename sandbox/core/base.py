"""The interface of every sandbox: run a program once, or hold an interactive session with it."""

from collections.abc import Iterable, Mapping
from typing import Protocol

from rollgym.sandbox.core.limits import DEFAULT_LIMITS, Limits
from rollgym.sandbox.core.program import Program
from rollgym.sandbox.core.result import Guarantees, RunResult


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
