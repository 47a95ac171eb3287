"""The common part of the back-ends that share the launcher; each differs in its confinement only."""

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from rollgym.sandbox.core.base import (
    Cancellation,
    Guarantees,
    Outcome,
    Program,
    RunResult,
    SandboxSession,
    SandboxUnavailableError,
)
from rollgym.sandbox.core.languages import (
    ENVIRONMENT,
    WORKING_DIRECTORY,
    Commands,
    MissingToolError,
    commands,
    host_toolchain,
)
from rollgym.sandbox.core.limits import DEFAULT_LIMITS, LONGEST_SECONDS, Limits
from rollgym.sandbox.core.outcomes import Facts, classify
from rollgym.sandbox.core.probe import probe_sandbox
from rollgym.sandbox.core.uploads import EndedSession, refused
from rollgym.sandbox.supervisor.frames import FrameError, SupervisorMessage, receive_frame, send_frame
from rollgym.sandbox.supervisor.order import Order, Stage

_CHUNK = 1 << 16


class SupervisedSession:
    """The server's end of a session. One thread at a time may use it; any may hang up.

    Args:
        connection: To the monitor, which answers once, at the end.
        to_program: The writing end of the program's input.
        from_program: The reading end of its output.
        result: Makes a result of the monitor's answer.
    """

    def __init__(
        self,
        connection: socket.socket,
        to_program: int,
        from_program: int,
        result: Callable[[SupervisorMessage | None], RunResult],
    ) -> None:
        self._connection, self._to_program, self._from_program = connection, to_program, from_program
        self._make_result = result
        self._result: RunResult | None = None

    def write(self, data: bytes) -> None:
        """Write to the program's standard input.

        Raises:
            BrokenPipeError: If it has ended.
        """
        if self._result is not None:
            raise BrokenPipeError("the session is closed")
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._to_program, rest) :]

    def read(self, timeout_seconds: float) -> bytes:
        """Return new output as soon as there is some; empty at the end or at the time-out."""
        if self._result is not None:
            return b""
        return os.read(self._from_program, _CHUNK) if _readable(self._from_program, timeout_seconds) else b""

    @property
    def alive(self) -> bool:
        """Whether the program is still running."""
        return self._result is None and not _readable(self._connection.fileno(), 0.0)

    def hang_up(self) -> None:
        """End the program, from any thread; who writes to it hears that it has ended."""
        # From here on the monitor reads the end of our stream, and ends the run; its answer still comes.
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)

    def close(self) -> RunResult:
        """End the program, and everything that it started; return its result."""
        if self._result is None:
            self.hang_up()
            try:
                self._result = self._make_result(receive_frame(self._connection))
            except (OSError, FrameError) as error:
                self._result = RunResult(outcome=Outcome.SANDBOX_ERROR, detail=f"{error}")
            finally:
                self._connection.close()
                os.close(self._to_program)
                os.close(self._from_program)
        return self._result


def _readable(descriptor: int, timeout_seconds: float) -> bool:
    # Servers have more descriptors than select() can look at.
    watched = select.poll()
    watched.register(descriptor, select.POLLIN)
    return bool(watched.poll(1000 * max(0.0, timeout_seconds)))


# `rollgym` is an empty package there: its own `__init__` cannot run in a process without site-packages.
_START = """
import sys, types
package = sys.modules["rollgym"] = types.ModuleType("rollgym")
package.__path__ = [sys.argv[1]]
from rollgym.sandbox.supervisor.launcher import main
main()
"""
_CLOSING_SECONDS = 10.0
_PACKAGE = str(Path(__file__).resolve().parents[2])


class Launcher:
    """The process that forks a monitor for each run; started at the first run, and again if it was lost.

    Args:
        confinement: The usual confinement of its runs.
    """

    def __init__(self, confinement: str) -> None:
        self._confinement = confinement
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def connect(self) -> socket.socket:
        """Return a connection to a new monitor.

        Raises:
            OSError: If no process can be started.
        """
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            if self._socket is None or self._process is None or self._process.poll() is not None:
                self._start()
            try:
                self._hand_over(theirs)
            except OSError:  # It died just now.
                self._start()
                self._hand_over(theirs)
        return ours

    def close(self) -> None:
        """End the launcher process, and wait until the remains of its runs are removed.

        This does not end running programs; close it only after all runs have ended.
        """
        with self._lock:
            if self._socket is not None:
                self._socket.close()
                self._socket = None
            if self._process is not None:
                try:
                    self._process.wait(_CLOSING_SECONDS)
                except subprocess.TimeoutExpired:  # A process that the kernel cannot end holds it up.
                    self._process.kill()
                    self._process.wait()
                self._process = None

    def _hand_over(self, connection: socket.socket) -> None:
        assert self._socket is not None
        socket.send_fds(self._socket, [b"m"], [connection.fileno()])

    def _start(self) -> None:
        if self._socket is not None:
            self._socket.close()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        arguments = [sys.executable, "-I", "-S", "-c", _START, _PACKAGE]
        arguments += [str(theirs.fileno()), self._confinement]
        with theirs:
            # An empty environment: even a program that breaks out can learn nothing from it.
            self._process = subprocess.Popen(
                arguments,
                pass_fds=[theirs.fileno()],
                env={},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._socket = ours


class SupervisedSandbox:
    """A back-end whose runs are watched by this package's own monitor.

    Args:
        read_only: Directories that programs see besides the system's, for interpreters and packages.
        cgroups: Whether to use control groups if they are writable.
    """

    name: str
    claims: Guarantees
    confinement: ClassVar[str]
    """The name of what surrounds a run, in `supervisor/confinements.py`."""

    def __init__(self, *, read_only: Sequence[str] = (), cgroups: bool = True) -> None:
        self._read_only, self._cgroups = tuple(read_only), cgroups
        self._launcher = Launcher(self.confinement)
        self._toolchain = host_toolchain()
        if not self._toolchain.python.startswith("/usr/"):
            self._read_only += (sys.base_prefix,)
        self._seen: Guarantees | None = None

    def probe(self) -> Guarantees:
        """Run a control program and an attempt to escape, and return the verified guarantees.

        Raises:
            SandboxUnavailableError: If it does not work on this machine, with the reason and the remedy.
        """
        if self._seen is None:
            self._check()
            self._seen = probe_sandbox(self)
        return self._seen

    def remedy(self, reason: str) -> str:
        """Return what an operator can do if the back-end fails for this reason."""
        raise NotImplementedError

    def _check(self) -> None:
        """Fail at once if the back-end cannot work here.

        Raises:
            SandboxUnavailableError: With the reason and the remedy.
        """

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
        """Run a program to its end, or until it is cancelled."""
        return self._run(program, files, stdin, limits, list(collect), None, cancellation or Cancellation())

    def run_from(self, source: int, program: Program, *, limits: Limits = DEFAULT_LIMITS) -> RunResult:
        """Run a program whose standard input is read from a descriptor of ours, as it comes."""
        return self._run(program, {}, b"", limits, [], source, Cancellation())

    def open_session(
        self, program: Program, *, files: Mapping[str, bytes] = {}, limits: Limits = DEFAULT_LIMITS
    ) -> SandboxSession:
        """Start an interactive session with a program; `wall_seconds` bounds all of it.

        Its standard error is kept for the result of `close`.

        Raises:
            SandboxUnavailableError: If it cannot be started.
        """
        if (result := refused(program, files, limits)) is not None:
            return EndedSession(result)
        try:
            order, contents = self._order(program, files, limits, [])
            connection = self._launcher.connect()
        except (MissingToolError, OSError) as error:
            raise SandboxUnavailableError(f"{self.name}: {error}") from error
        program_reads, we_write = os.pipe()
        we_read, program_writes = os.pipe()
        session = SupervisedSession(connection, we_write, we_read, partial(self._result, order=order))
        try:
            head = replace(order, session=True).as_head()
            send_frame(connection, head, [b"", *contents], [program_reads, program_writes])
        except OSError as error:
            session.close()
            raise SandboxUnavailableError(f"{self.name}: {error}") from error
        finally:
            os.close(program_reads)
            os.close(program_writes)
        return session

    def close(self) -> None:
        """End the launcher of the back-end."""
        self._launcher.close()

    def _run(
        self,
        program: Program,
        files: Mapping[str, bytes],
        stdin: bytes,
        limits: Limits,
        collect: list[str],
        source: int | None,
        cancellation: Cancellation,
    ) -> RunResult:
        if (too_large := refused(program, files, limits)) is not None:
            return too_large
        try:
            order, contents = self._order(program, files, limits, collect)
            order = replace(order, follows_input=source is not None)
            with (
                self._launcher.connect() as connection,
                # The monitor reads the end of our stream, and ends the run; its answer still comes.
                cancellation.calling(partial(connection.shutdown, socket.SHUT_WR)),
            ):
                descriptors = [] if source is None else [source]
                send_frame(connection, order.as_head(), [stdin, *contents], descriptors)
                answer = receive_frame(connection)
        except (MissingToolError, OSError, FrameError) as error:
            return RunResult(outcome=Outcome.SANDBOX_ERROR, detail=f"{error}")
        return self._result(answer, order)

    def _order(
        self, program: Program, files: Mapping[str, bytes], limits: Limits, collect: list[str]
    ) -> tuple[Order, list[bytes]]:
        directory = self._directory()
        what = commands(program, self._toolchain, directory, files)
        laid = {what.source_name: program.source.encode(errors="surrogateescape"), **files}
        order = Order(
            confinement=self.confinement,
            stages=_stages(what, limits),
            limits=limits,
            environment={**ENVIRONMENT, "HOME": directory, **self._environment(directory)},
            directory=directory,
            file_names=list(laid),
            collect=collect,
            most_collected=limits.output_kb << 10,
            read_only=self._read_only,
            cgroups=self._cgroups,
        )
        return order, list(laid.values())

    def _directory(self) -> str:
        """Return the working directory of a run, as its program sees it."""
        return WORKING_DIRECTORY

    def _environment(self, directory: str) -> Mapping[str, str]:
        """Return the environment variables of a run besides the usual ones."""
        return {}

    def _result(self, answer: SupervisorMessage | None, order: Order) -> RunResult:
        if answer is None:
            return RunResult(outcome=Outcome.SANDBOX_ERROR, detail="the monitor of the run is gone")
        if "error" in answer.head:
            return RunResult(outcome=Outcome.SANDBOX_ERROR, detail=str(answer.head["error"]))
        stages = answer.head["stages"]
        guarantees = replace(
            self._seen or self.claims, memory="sum" if answer.head["sum"] else self.claims.memory
        )
        names, contents = answer.head["names"], answer.blobs[2 * len(stages) :]
        results = [
            result_of_stage(
                facts, answer.blobs[2 * index : 2 * index + 2], _limits_of(stage, order.limits), guarantees
            )
            for index, (facts, stage) in enumerate(zip(stages, order.stages, strict=False))
        ]
        compiling = results[0] if len(order.stages) > 1 else None
        if len(stages) < len(order.stages):
            assert compiling is not None
            return replace(
                compiling,
                outcome=Outcome.COMPILE_ERROR,
                detail=f"the compiler failed: {compiling.detail}",
                compiling=compiling,
            )
        return replace(results[-1], compiling=compiling, files=dict(zip(names, contents, strict=True)))


def _stages(what: Commands, limits: Limits) -> list[Stage]:
    stages = []
    if what.compile is not None:
        stages.append(
            Stage(what.compile, limits.compile_seconds, limits.compile_seconds, limits.compile_memory_mb)
        )
    cpu_seconds = limits.cpu_seconds or min(limits.wall_seconds + 1, LONGEST_SECONDS)
    return [*stages, Stage(what.run, limits.wall_seconds, cpu_seconds, limits.memory_mb)]


def _limits_of(stage: Stage, limits: Limits) -> Limits:
    return replace(
        limits, wall_seconds=stage.wall_seconds, cpu_seconds=stage.cpu_seconds, memory_mb=stage.memory_mb
    )


def result_of_stage(
    facts: Mapping[str, Any], output: Sequence[bytes], limits: Limits, guarantees: Guarantees | None
) -> RunResult:
    """Return the result that a monitor's facts about one command amount to."""
    status = facts["status"]
    exit_code = os.WEXITSTATUS(status) if status is not None and os.WIFEXITED(status) else None
    ended_by = os.WTERMSIG(status) if status is not None and os.WIFSIGNALED(status) else None
    stopped_for = None if facts["stopped_for"] == "closed" else facts["stopped_for"]
    # A program may have ended by itself just before it was to be ended.
    closed = facts["stopped_for"] == "closed" and exit_code is None
    stopped = closed or stopped_for is not None
    known = Facts(
        exit_code=None if stopped else exit_code,
        signal=signal.SIGKILL if stopped else ended_by,
        stopped_for=stopped_for,
        memory_exhausted=facts["memory_exhausted"],
        disk_full=facts["disk_full"],
        pids_refused=facts["pids_refused"],
        cpu_seconds=facts["cpu_seconds"],
        stderr=output[1],
    )
    outcome, detail = classify(known, limits)
    if closed and outcome is not Outcome.MEMORY_LIMIT:
        outcome, detail = Outcome.OK, "it was closed"
    return RunResult(
        outcome=outcome,
        exit_code=known.exit_code,
        signal=known.signal,
        stdout=output[0],
        stderr=output[1],
        stdout_truncated=facts["truncated"][0],
        stderr_truncated=facts["truncated"][1],
        wall_seconds=facts["wall_seconds"],
        cpu_seconds=facts["cpu_seconds"],
        peak_memory_mb=facts["peak_bytes"] / (1 << 20),
        detail=detail,
        guarantees=guarantees,
    )
