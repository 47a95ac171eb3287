"""Interactive sessions with programs in the sandbox of a server."""

import asyncio
import socket
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from clients.protocol.errors import ProblemError
from env_server.access.tokens import Caller
from env_server.common.setting_sections import SandboxSettings
from env_server.messages.validation import validate
from env_server.operations.sandbox import ServedSandbox, Slots, asked_for
from env_server.sessions.replies import Reply
from sandbox.core.base import SandboxSession, SandboxUnavailableError
from sandbox.remote.run_code import Run, RunCodeRequest, build_reply

_T = TypeVar("_T")


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
