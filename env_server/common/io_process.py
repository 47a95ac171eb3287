"""One I/O process of a server: its rank, its phase (starting, ready or draining), and why it takes no sessions.

When it is to end, it knows who still waits for an answer.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rollgym.clients.protocol.errors import ProblemError

_RETRY_S = 2
ReasonCode = Literal[
    "starting",
    "draining",
    "registrations",
    "workers",
    "threads",
    "state_dir",
    "journal",
    "process_away",
]
"""Why a server is not ready."""

_LAST_WORDS_S = 1.0


@dataclass(frozen=True, slots=True)
class ProcessRank:
    """The rank of an I/O process in its server.

    Attributes:
        index: Its rank, from 0; also the first part of the ids of the sessions that this process owns.
        processes: How many I/O processes the server has.
        restarts: How often the process of this rank was restarted.
        directory: The directory that the processes of this server share (journals, Unix sockets, shared tables), or
            None if a single process keeps no state on disk.
    """

    index: int = 0
    processes: int = 1
    directory: Path | None = None
    restarts: int = 0


class ServerPhase(Enum):
    """The phases of a server's life."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


class Reason(NamedTuple):
    """One reason why an I/O process is not ready. It is public: it names no paths.

    Attributes:
        code: One of the documented codes.
        detail: A sentence for people.
        process: The process that is not ready.
    """

    code: ReasonCode
    detail: str
    process: int


class Lifecycle:
    """The phase of this process."""

    def __init__(self) -> None:
        self.phase = ServerPhase.STARTING

    def require_open(self) -> None:
        """Refuse an operation that would begin a new session, unless the server is ready.

        Raises:
            ProblemError: `draining`.
        """
        if self.phase is not ServerPhase.READY:
            raise self._problem()

    def require_started(self) -> None:
        """Refuse an operation that needs the sessions and environments, until they are known.

        Raises:
            ProblemError: `draining`.
        """
        if self.phase is ServerPhase.STARTING:
            raise self._problem()

    def _problem(self) -> ProblemError:
        return ProblemError("draining", f"the server is {self.phase.value}", retry_after=_RETRY_S)


def going_away() -> ProblemError:
    """The problem that a server ends before it has an answer."""
    return ProblemError("draining", "the server is going away", retry_after=_RETRY_S)


class Unanswered:
    """Tasks that still owe a client an answer: the shutdown of a server waits for them, and cancels late ones.

    Calls that wait for another server have no task; the object that holds them registers a function that answers them
    all.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._give_up: set[Callable[[], None]] = set()
        self._fewer: asyncio.Future[None] | None = None

    def add(self, task: asyncio.Task[Any]) -> None:
        """Note a task that has answered when it ends."""
        self._tasks.add(task)
        task.add_done_callback(self.leave)

    def enter(self) -> asyncio.Task[Any]:
        """Register the current task, which calls `leave` once it has answered; it may then continue with other work."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        return task

    def leave(self, task: asyncio.Task[Any]) -> None:
        """Note that a task has answered."""
        self._tasks.discard(task)
        if self._fewer is not None and not self._fewer.done():
            self._fewer.set_result(None)

    def attend(self, give_up: Callable[[], None]) -> None:
        """Register a function that answers all calls held for other servers; it runs when the wait for them ends."""
        self._give_up.add(give_up)

    def dismiss(self, give_up: Callable[[], None]) -> None:
        """Unregister a function that `attend` registered."""
        self._give_up.discard(give_up)

    async def settle(self, patience_s: float) -> None:
        """Wait for those that are here now; who has not answered in time is cancelled, and is to say that."""
        waiting = set(self._tasks)
        # Also without patience: a task that has just got its answer, or a problem, sends it in one of the next turns.
        if not await self._have_left(waiting, max(patience_s, _LAST_WORDS_S)):
            for task in waiting & self._tasks:
                task.cancel()
        others = self._tasks - waiting
        for give_up in list(self._give_up):
            give_up()
        await self._have_left(self._tasks - others, _LAST_WORDS_S)

    async def _have_left(self, waiting: set[asyncio.Task[Any]], patience_s: float) -> bool:
        try:
            async with asyncio.timeout(patience_s):
                while not waiting.isdisjoint(self._tasks):
                    self._fewer = asyncio.get_running_loop().create_future()
                    await self._fewer
        except TimeoutError:
            return False
        return True
