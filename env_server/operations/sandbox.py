"""The sandbox of a server, for programs that run in it to their end (`POST /run_code`) and for interactive sessions."""

import asyncio
import socket
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

from rollgym.clients.protocol.errors import ProblemError
from rollgym.env_server.access.context import Context
from rollgym.env_server.access.tokens import Caller
from rollgym.env_server.common.event_loop import is_given_up
from rollgym.env_server.common.io_process import going_away
from rollgym.env_server.common.metrics import Metrics
from rollgym.env_server.common.requests import invalid, refuse_fields, requested, validate
from rollgym.env_server.common.settings import ConfigurationError, SandboxSettings
from rollgym.env_server.sessions.replies import Reply
from rollgym.sandbox.core.base import (
    LANGUAGES,
    CancellableSandbox,
    Cancellation,
    RunResult,
    SandboxSession,
    SandboxUnavailableError,
)
from rollgym.sandbox.remote.run_code import RequestedRun, RunCodeRequest, build_reply, read_request
from rollgym.sandbox.selection import open_cancellable

_RETRY_AFTER_S = 1
_LIMITS = (
    *("max_runs", "max_waiting_runs", "max_run_s", "max_run_memory_mb"),
    *("max_program_sessions", "max_program_session_s"),
)
_T = TypeVar("_T")


class ServedSandbox:
    """The sandbox, and the limits of its callers.

    Args:
        settings: Its back-end, and the upper limits of a program.
    """

    def __init__(self, settings: SandboxSettings) -> None:
        self._settings = settings
        self._opened: CancellableSandbox | None = None

    async def start(self) -> None:
        """Open it; it is looked at before anything runs in it.

        Raises:
            ConfigurationError: If it does not work here.
        """
        try:
            self._opened = await asyncio.to_thread(open_cancellable, self._settings.sandbox)
        except SandboxUnavailableError as error:
            raise ConfigurationError(f"sandbox: {error}") from error

    async def close(self) -> None:
        """End the sandbox and release its resources."""
        if self._opened is not None:
            await asyncio.to_thread(self._opened.close)

    @property
    def sandbox(self) -> CancellableSandbox:
        """The sandbox; the server opens it before it answers requests."""
        assert self._opened is not None, "the server starts its sandbox before it answers"
        return self._opened

    def check(self, request: RunCodeRequest, longest_s: float, setting: str) -> None:
        """Refuse a request that exceeds the limits of callers.

        Args:
            request: The request.
            longest_s: The longest run that is allowed, in seconds.
            setting: The name of the setting of that limit.

        Raises:
            ProblemError: `invalid_request`.
        """
        settings = self._settings
        if request.run_timeout > longest_s:
            raise invalid("run_timeout", f"at most {longest_s:g} (the server's {setting})")
        if request.compile_timeout > settings.max_run_s:
            raise invalid("compile_timeout", f"at most {settings.max_run_s:g} (the server's max_run_s)")
        asked = {
            "memory_limit_MB": request.memory_limit_MB,
            "limits.compile_memory_mb": request.limits.compile_memory_mb or 0,
        }
        for name, mib in asked.items():
            if mib > settings.max_run_memory_mb:
                raise invalid(name, f"at most {settings.max_run_memory_mb} (the server's max_run_memory_mb)")


class Slots:
    """A limit of concurrent uses, in all and for each token.

    Args:
        limit: In all.
        per_token: The limit of a token whose entry sets none.
        name: The setting of the limit.
        what: The name of the counted things, for people.
    """

    def __init__(self, limit: int, per_token: int, name: str, what: str) -> None:
        self._limit = limit
        self._per_token = per_token
        self._name = name
        self._what = what
        self._taken: Counter[str] = Counter()

    def take(self, caller: Caller) -> None:
        """Count one more.

        Raises:
            ProblemError: `at_capacity`.
        """
        of_token = caller.quota.max_runs or self._per_token
        if self._taken[caller.name] >= of_token:
            raise ProblemError(
                "at_capacity",
                f"this token has its {of_token} {self._what}; ask again when one has ended",
                retry_after=_RETRY_AFTER_S,
                limit=f"{self._name}_per_token",
            )
        if self._taken.total() >= self._limit:
            raise ProblemError(
                "at_capacity",
                f"this server has its {self._limit} {self._what}; ask again later, or ask another server",
                retry_after=_RETRY_AFTER_S,
                limit=self._name,
            )
        self._taken[caller.name] += 1

    def leave(self, name: str) -> None:
        """Count one less of a token."""
        self._taken[name] -= 1
        if not self._taken[name]:
            del self._taken[name]


class RunningCode:
    """The handlers of `run_code` and `sandbox`. Each run has a thread; a run that finds no free thread waits for one.

    Args:
        settings: How many run and wait, and their resource limits.
        served: The environments whose sandboxes run them.
        metrics: Counts runs.
    """

    def __init__(self, settings: SandboxSettings, served: ServedSandbox, metrics: Metrics) -> None:
        self._settings = settings
        self._served = served
        self._metrics = metrics
        self._threads = ThreadPoolExecutor(settings.max_runs, thread_name_prefix="run-code")
        self._slots = Slots(
            settings.max_runs + settings.max_waiting_runs, settings.max_runs_per_token, "max_runs", "runs"
        )
        self._running: dict[asyncio.Future[Reply], Cancellation] = {}

    async def run_code(self, context: Context, fields: Mapping[str, Any]) -> Reply:
        """Run a program, and cancel it when its last caller has left."""
        request = requested(RunCodeRequest, fields)
        run = _asked_for(self._served, request, self._settings.max_run_s, "max_run_s")
        name = context.caller.name
        self._slots.take(context.caller)
        cancellation = Cancellation()
        running = asyncio.get_running_loop().run_in_executor(
            self._threads, partial(self._run, run, cancellation)
        )
        self._running[running] = cancellation
        running.add_done_callback(partial(self._ended, name))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            if not is_given_up():
                # All runs are, since the server ends.
                raise going_away() from None
            _give_up(running, cancellation)
            raise

    async def sandbox(self, context: Context, fields: Mapping[str, Any]) -> Reply:
        """Return the guarantees of the sandbox, and the limits of requests."""
        refuse_fields(fields)
        return {
            "guarantees": asdict(self._served.sandbox.probe()),
            "languages": list(LANGUAGES),
            "limits": {name: getattr(self._settings, name) for name in _LIMITS},
        }

    async def idle(self, timeout: float) -> None:
        """Wait until nothing runs, but not for longer."""
        if self._running:
            await asyncio.wait(self._running, timeout=timeout)

    async def close(self) -> None:
        """End all programs that still run."""
        for running, cancellation in list(self._running.items()):
            _give_up(running, cancellation)
        await asyncio.to_thread(self._threads.shutdown)

    def _run(self, run: RequestedRun, cancellation: Cancellation) -> Reply:
        """Run one program; called in a thread."""
        result = self._served.sandbox.run(
            run.program,
            files=run.files,
            stdin=run.stdin,
            limits=run.limits,
            collect=run.collect,
            cancellation=cancellation,
        )
        return build_reply(result, host=socket.gethostname())

    def _ended(self, name: str, running: "asyncio.Future[Reply]") -> None:
        del self._running[running]
        self._slots.leave(name)
        if running.cancelled():
            self._metrics.runs["cancelled"] += 1
        elif running.exception() is None:
            self._metrics.runs[running.result()["outcome"]] += 1


def _asked_for(
    served: ServedSandbox, request: RunCodeRequest, longest_s: float, setting: str
) -> RequestedRun:
    """Parse a request into a run, if it is within the limits.

    Raises:
        ProblemError: `invalid_request`.
    """
    served.check(request, longest_s, setting)
    try:
        return read_request(request)
    except ValueError as error:
        reason = str(error)
        raise ProblemError("invalid_request", reason, errors=[{"field": "", "reason": reason}]) from error


def _give_up(running: "asyncio.Future[Reply]", cancellation: Cancellation) -> None:
    """Remove a queued run, or end a running one, which frees its thread."""
    running.cancel()
    cancellation.cancel()


class InteractiveSessions:
    """Opens interactive sessions; their operations run in threads.

    Args:
        settings: How many may be open, and for how long.
        served: The environments whose sandboxes run them.
    """

    def __init__(self, settings: SandboxSettings, served: ServedSandbox) -> None:
        self._settings = settings
        self._served = served
        limit = settings.max_program_sessions
        self._slots = Slots(
            limit, settings.max_runs_per_token, "max_program_sessions", "interactive sessions"
        )
        # Two for each: its end begins while its last operation is in flight, and must not wait for another session.
        self._threads = ThreadPoolExecutor(2 * limit, thread_name_prefix="program")
        self._open: set[InteractiveSession] = set()
        self._closed = False

    async def open(self, caller: Caller, fields: Mapping[str, Any]) -> "InteractiveSession":
        """Start a program. If the caller is cancelled meanwhile, the program is ended as soon as it has started.

        Raises:
            ProblemError: `invalid_request`, `at_capacity`, `draining`, or `env_error` if the sandbox fails.
        """
        longest_s = self._settings.max_program_session_s
        request = validate(RunCodeRequest, fields)
        run = _asked_for(self._served, request, longest_s, "max_program_session_s")
        if self._closed:
            raise going_away()
        self._slots.take(caller)
        start = partial(self._served.sandbox.open_session, run.program, files=run.files, limits=run.limits)
        program = InteractiveSession(start, self._threads, partial(self._leave, caller.name))
        self._open.add(program)
        try:
            await program.start()
        except SandboxUnavailableError as error:
            self._leave(caller.name, program)
            raise ProblemError(
                *("env_error", str(error)), error_class="SandboxUnavailableError", message=str(error)
            ) from error
        except BaseException:
            program.end()
            raise
        return program

    async def close(self) -> None:
        """End all programs, and those that are being started as soon as they are there."""
        self._closed = True
        # Before the first await: a cancellation then ends all of them.
        endings = [program.end() for program in self._open]
        await asyncio.gather(*map(asyncio.shield, endings))
        await asyncio.to_thread(self._threads.shutdown)

    def _leave(self, name: str, program: "InteractiveSession") -> None:
        if program in self._open:
            self._open.remove(program)
            self._slots.leave(name)


class Programs:
    """What runs in the sandbox of a server that has one of its own.

    Args:
        settings: The sandbox, and the limits of its callers.
        metrics: Counts the programs.

    Attributes:
        running: Those that run to their end.
        interactive: Those with a conversation over a socket.
    """

    def __init__(self, settings: SandboxSettings, metrics: Metrics) -> None:
        self._sandbox = ServedSandbox(settings)
        self.running = RunningCode(settings, self._sandbox, metrics)
        self.interactive = InteractiveSessions(settings, self._sandbox)

    async def start(self) -> None:
        """Open the sandbox.

        Raises:
            ConfigurationError: If it does not work here.
        """
        await self._sandbox.start()

    async def close(self) -> None:
        """End all programs, and the sandbox."""
        await self.running.close()
        await self.interactive.close()
        await self._sandbox.close()


class InteractiveSession:
    """A running program. Its operations run in threads, one after another.

    A thread cannot be cancelled. A cancelled caller therefore returns at once while its thread continues; the end of
    the program waits for that thread in a thread of its own, so no task in the loop has to wait.

    Args:
        start: Starts the program.
        threads: Runs the start and all other operations.
        closed: Called when the program has ended.
    """

    def __init__(
        self,
        start: Callable[[], SandboxSession],
        threads: ThreadPoolExecutor,
        closed: Callable[["InteractiveSession"], None],
    ) -> None:
        self._start = start
        self._threads = threads
        self._closed = closed
        # Set once what was asked last is done. A lock would let whoever comes first go first, and not who asked first.
        self._last_done = threading.Event()
        self._last_done.set()
        self._session: SandboxSession | None = None
        self._ended = False
        self._under_way: set[asyncio.Future[Any]] = set()
        self._ending: asyncio.Future[RunResult | None] | None = None

    async def start(self) -> None:
        """Start it.

        Raises:
            ProblemError: `draining` if it is ended before it is there.
            SandboxUnavailableError: If the sandbox fails.
        """
        if not await self._do(self._start_unless_ended):
            raise going_away()

    async def write(self, data: bytes) -> None:
        """Let it read this.

        Raises:
            ProblemError: `session_gone` if it has ended.
        """
        try:
            await self._do(lambda: self._started.write(data))
        except BrokenPipeError as error:
            raise ProblemError("session_gone", "the program has ended", reason="closed") from error

    async def read(self, timeout_s: float) -> bytes:
        """Return the program's output; empty at the time-out, or at its end."""
        return await self._do(lambda: self._started.read(timeout_s))

    async def alive(self) -> bool:
        """Whether the program is still running."""
        return await self._do(lambda: self._started.alive)

    async def close(self) -> Reply:
        """End the program, even if a thread still waits for it; return its outcome."""
        result = await asyncio.shield(self.end())
        assert result is not None, "who closes a program has seen it start"
        return build_reply(result, host=socket.gethostname())

    def end(self) -> "asyncio.Future[RunResult | None]":
        """End the program, even if no caller waits for it; return its outcome, or None if it never started."""
        if self._ending is None:
            if self._under_way and self._session is not None:
                # Who writes to a program that does not read is held back until that ends.
                hang_up = getattr(self._session, "hang_up", None)
                if hang_up is not None:
                    hang_up()
            self._ending = self._in_thread(self._close_session)
            self._ending.add_done_callback(lambda _: self._closed(self))
        return self._ending

    @property
    def _started(self) -> SandboxSession:
        assert self._session is not None, "who asks something of a program has seen it start"
        return self._session

    async def _do(self, call: Callable[[], _T]) -> _T:
        running = self._in_thread(call)
        self._under_way.add(running)
        running.add_done_callback(self._under_way.discard)
        return await asyncio.shield(running)

    def _in_thread(self, call: Callable[[], _T]) -> "asyncio.Future[_T]":
        before, done = self._last_done, threading.Event()
        self._last_done = done

        def in_turn() -> _T:
            before.wait()
            try:
                return call()
            finally:
                done.set()

        return asyncio.get_running_loop().run_in_executor(self._threads, in_turn)

    # In a thread, one at a time

    def _start_unless_ended(self) -> bool:
        if not self._ended:
            self._session = self._start()
        return not self._ended

    def _close_session(self) -> RunResult | None:
        self._ended = True
        return None if self._session is None else self._session.close()
