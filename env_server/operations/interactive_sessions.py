"""Interactive sessions with programs in the sandbox of a server."""

import asyncio
import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from rollgym.clients.protocol.errors import ProblemError
from rollgym.env_server.access.tokens import Caller
from rollgym.env_server.common.io_process import going_away
from rollgym.env_server.common.setting_sections import SandboxSettings
from rollgym.env_server.messages.validation import validate
from rollgym.env_server.operations.sandbox import ServedSandbox, Slots, asked_for
from rollgym.env_server.sessions.replies import Reply
from rollgym.sandbox.core.base import SandboxSession, SandboxUnavailableError
from rollgym.sandbox.core.result import RunResult
from rollgym.sandbox.remote.run_code import RunCodeRequest, build_reply

_T = TypeVar("_T")


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
        run = asked_for(self._served, request, longest_s, "max_program_session_s")
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
        self._turn = threading.Lock()
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
        def in_turn() -> _T:
            with self._turn:
                return call()

        return asyncio.get_running_loop().run_in_executor(self._threads, in_turn)

    # In a thread, one at a time

    def _start_unless_ended(self) -> bool:
        if not self._ended:
            self._session = self._start()
        return not self._ended

    def _close_session(self) -> RunResult | None:
        self._ended = True
        return None if self._session is None else self._session.close()
