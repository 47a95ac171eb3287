"""Programs in this server's sandbox that are spoken to."""

import asyncio
import socket
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from clients.protocol.errors import ProblemError
from env_server.access.auth import Caller
from env_server.common.settings import Settings
from env_server.operations.running_code import asked_for
from env_server.operations.served_sandbox import Places, ServedSandbox
from env_server.sessions.replies import Reply
from sandbox.core.base import SandboxSession, SandboxUnavailableError
from sandbox.remote.run_code import Run, build_reply

_T = TypeVar("_T")


class ProgramSessions:
    """Opens programs that are spoken to; each has a thread while something is asked of it.

    Args:
        settings: How many there may be, and for how long.
        served: Where they run.
    """

    def __init__(self, settings: Settings, served: ServedSandbox) -> None:
        self._settings = settings
        self._served = served
        limit = settings.max_program_sessions
        self._places = Places(
            limit, settings.max_runs_per_token, "max_program_sessions", "programs that are spoken to"
        )
        self._threads = ThreadPoolExecutor(limit, thread_name_prefix="program")
        self._open: set[Program] = set()

    async def open(self, caller: Caller, fields: Mapping[str, Any]) -> "Program":
        """Start a program.

        Raises:
            ProblemError: `invalid_request`, `at_capacity`, or `env_error` where the sandbox fails.
        """
        longest_s = self._settings.max_program_session_s
        run = asked_for(self._served, fields, longest_s, "max_program_session_s")
        self._places.take(caller)
        loop = asyncio.get_running_loop()
        try:
            session = await loop.run_in_executor(self._threads, partial(self._start, run))
        except SandboxUnavailableError as error:
            self._places.leave(caller.name)
            raise ProblemError(
                *("env_error", str(error)), error_class="SandboxUnavailableError", message=str(error)
            ) from error
        except BaseException:
            self._places.leave(caller.name)
            raise
        program = Program(session, self._threads, partial(self._closed, caller.name))
        self._open.add(program)
        return program

    async def close(self) -> None:
        """End all programs."""
        await asyncio.gather(*(program.close() for program in list(self._open)))
        await asyncio.to_thread(self._threads.shutdown)

    def _start(self, run: Run) -> SandboxSession:
        """In a thread."""
        return self._served.sandbox.open_session(run.program, files=run.files, limits=run.limits)

    def _closed(self, name: str, program: "Program") -> None:
        self._open.discard(program)
        self._places.leave(name)


class Program:
    """A program that runs. What is asked of it is done in threads, one thing after another."""

    def __init__(
        self, session: SandboxSession, threads: ThreadPoolExecutor, closed: Callable[["Program"], None]
    ) -> None:
        self._session = session
        self._threads = threads
        self._closed = closed
        self._turn = asyncio.Lock()
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
        """End it; gives what became of it."""
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
