"""The sandbox of a server: programs that run to their end (`POST /run_code`), and interactive sessions."""

import asyncio
import socket
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

from clients.protocol.errors import ProblemError
from env_server.access.context import Context
from env_server.access.tokens import Caller
from env_server.common.event_loop import is_given_up
from env_server.common.io_process import going_away
from env_server.common.setting_sections import SandboxSettings
from env_server.common.settings import ConfigurationError
from env_server.messages.validation import invalid, refuse_fields, requested, validate
from env_server.sessions.replies import Reply
from env_server.telemetry.metrics import Metrics
from sandbox.core.base import SandboxSession, SandboxUnavailableError
from sandbox.core.cancelling import CancellableSandbox, Cancellation
from sandbox.core.program import LANGUAGES
from sandbox.remote.run_code import Run, RunCodeRequest, build_reply, read_request
from sandbox.selection import open_cancellable

_RETRY_AFTER_S = 1
_LIMITS = (
    *("max_runs", "max_waiting_runs", "max_run_s", "max_run_memory_mb"),
    *("max_program_sessions", "max_program_session_s"),
)
_T = TypeVar("_T")


class ServedSandbox:
    """The sandbox, and what callers may ask of it.

    Args:
        settings: Which one it is, and the most that a program may use.
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
        """End it."""
        if self._opened is not None:
            await asyncio.to_thread(self._opened.close)

    @property
    def sandbox(self) -> CancellableSandbox:
        """The sandbox itself."""
        assert self._opened is not None, "the server starts its sandbox before it answers"
        return self._opened

    def check(self, request: RunCodeRequest, longest_s: float, setting: str) -> None:
        """Refuse a request for more than callers may have.

        Args:
            request: What is asked for.
            longest_s: For how long the program may run.
            setting: That says so.

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
    """How many there may be of something, in all and of one token.

    Args:
        limit: In all.
        per_token: Of a token whose entry says nothing.
        name: The setting of the limit.
        what: What is counted, for people.
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
    """The handlers of `run_code` and `sandbox`. Each run has a thread; who finds none free waits for one.

    Args:
        settings: How many run and wait, and what they may use.
        served: Where they run.
        metrics: Where runs are counted.
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
        """Run a program, and give it up when nobody waits for it any more."""
        request = requested(RunCodeRequest, fields)
        run = asked_for(self._served, request, self._settings.max_run_s, "max_run_s")
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
        """Say what the sandbox keeps to, and what may be asked of it."""
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
        """End what still runs."""
        for running, cancellation in list(self._running.items()):
            _give_up(running, cancellation)
        await asyncio.to_thread(self._threads.shutdown)

    def _run(self, run: Run, cancellation: Cancellation) -> Reply:
        """In a thread."""
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


def asked_for(served: ServedSandbox, request: RunCodeRequest, longest_s: float, setting: str) -> Run:
    """What a request asks for, if it may be asked for.

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
    """Take out of the queue what has not begun; end what runs, and free its thread with it."""
    running.cancel()
    cancellation.cancel()


class InteractiveSessions:
    """Opens interactive sessions; each has a thread while something is asked of it.

    Args:
        settings: How many there may be, and for how long.
        served: Where they run.
    """

    def __init__(self, settings: SandboxSettings, served: ServedSandbox) -> None:
        self._settings = settings
        self._served = served
        limit = settings.max_program_sessions
        self._slots = Slots(
            limit, settings.max_runs_per_token, "max_program_sessions", "interactive sessions"
        )
        self._threads = ThreadPoolExecutor(limit, thread_name_prefix="program")
        self._open: set[InteractiveSession] = set()

    async def open(self, caller: Caller, fields: Mapping[str, Any]) -> "InteractiveSession":
        """Start a program.

        Raises:
            ProblemError: `invalid_request`, `at_capacity`, or `env_error` where the sandbox fails.
        """
        longest_s = self._settings.max_program_session_s
        request = validate(RunCodeRequest, fields)
        run = asked_for(self._served, request, longest_s, "max_program_session_s")
        self._slots.take(caller)
        loop = asyncio.get_running_loop()
        try:
            session = await loop.run_in_executor(self._threads, partial(self._start, run))
        except SandboxUnavailableError as error:
            self._slots.leave(caller.name)
            raise ProblemError(
                *("env_error", str(error)), error_class="SandboxUnavailableError", message=str(error)
            ) from error
        except BaseException:
            self._slots.leave(caller.name)
            raise
        program = InteractiveSession(session, self._threads, partial(self._closed, caller.name))
        self._open.add(program)
        return program

    async def close(self) -> None:
        """End all programs."""
        await asyncio.gather(*(program.close() for program in list(self._open)))
        await asyncio.to_thread(self._threads.shutdown)

    def _start(self, run: Run) -> SandboxSession:
        """In a thread."""
        return self._served.sandbox.open_session(run.program, files=run.files, limits=run.limits)

    def _closed(self, name: str, program: "InteractiveSession") -> None:
        self._open.discard(program)
        self._slots.leave(name)


class InteractiveSession:
    """A program that runs. What is asked of it is done in threads, one thing after another."""

    def __init__(
        self,
        session: SandboxSession,
        threads: ThreadPoolExecutor,
        closed: Callable[["InteractiveSession"], None],
    ) -> None:
        self._session = session
        self._threads = threads
        self._closed = closed
        self._turn = asyncio.Lock()
        self._closing = False
        self._reply: Reply | None = None

    async def write(self, data: bytes) -> None:
        """Let it read this.

        Raises:
            ProblemError: `session_gone` if it has ended.
        """
        try:
            await self._do(partial(self._session.write, data))
        except BrokenPipeError as error:
            raise ProblemError("session_gone", "the program has ended", reason="closed") from error

    async def read(self, timeout_s: float) -> bytes:
        """What it has written; nothing at the time-out, or at its end."""
        return await self._do(partial(self._session.read, timeout_s))

    async def alive(self) -> bool:
        """Whether it runs."""
        return await self._do(lambda: self._session.alive)

    async def close(self) -> Reply:
        """End it, whatever a thread waits for meanwhile; gives what became of it."""
        if self._turn.locked() and not self._closing:
            # Who writes to a program that does not read is held back until that ends.
            hang_up = getattr(self._session, "hang_up", None)
            if hang_up is not None:
                hang_up()
        self._closing = True
        if self._reply is None:
            result = await self._do(self._session.close)
            if self._reply is None:
                self._reply = build_reply(result, host=socket.gethostname())
                self._closed(self)
        return self._reply

    async def _do(self, call: Callable[[], _T]) -> _T:
        async with self._turn:
            # A thread cannot be given up, and nobody else may use the session before it is done.
            running = asyncio.get_running_loop().run_in_executor(self._threads, call)
            try:
                return await asyncio.shield(running)
            except asyncio.CancelledError:
                await asyncio.wait({running})
                raise
