"""A process of a role as the driver sees it, and the ranks of a model that are such processes."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol

from rollgym.trainer.backends.transport import RankDiedError, pack, unpack
from rollgym.trainer.core.errors import RoleDiedError

_CAUSE_S = 10.0
"""How long the death that made another rank's call fail is waited for: the cluster has to find it out."""


class RoleProcess(Protocol):
    """A process of a role, wherever it is.

    Attributes:
        pid: Its number on its machine.
        node: Its machine, for people; empty if it is beside the driver.
    """

    pid: int
    node: str

    def call(self, data: bytes) -> "Future[bytes]":
        """Send a call (see `RoleHost.call`); the returned future fails with `RoleDiedError` if the process dies."""
        ...

    def sees(self, path: str) -> bool:
        """Whether a file of this machine is one of the process's machine, too."""
        ...

    def on_death(self, tell: Callable[[RoleDiedError], None]) -> None:
        """Register a callback for an unrequested end of the process; it may run in any thread."""
        ...

    def end(self) -> None:
        """Kill the process, and return when it has exited. A second call does nothing."""
        ...


class ActorRanks:
    """Ranks that are processes of a role: a `RankTransport`.

    Args:
        role: The role's name.
        start: Starts a rank: takes its number and the number of ranks, and returns the process with its server.
        tell: Called with the first death of a rank, in any thread.
        end: Kills a process.
    """

    def __init__(
        self,
        role: str,
        start: Callable[[int, int], RoleProcess],
        tell: Callable[[RoleDiedError], None] = lambda _: None,
        end: Callable[[RoleProcess], None] = lambda process: process.end(),
    ) -> None:
        self._role = role
        self._end = end
        self._start = start
        self._tell = tell
        self._ranks: list[RoleProcess] = []
        self._asked: dict[Future[Any], int] = {}
        self._lock = threading.Lock()
        self._death: RankDiedError | None = None
        self._closed = False

    @property
    def pids(self) -> list[int]:
        """Return the process ids of the ranks, in rank order."""
        return [rank.pid for rank in self._ranks]

    def start(self, world_size: int) -> None:
        """Start `world_size` ranks, and return once all of them accept calls.

        Raises:
            RankDiedError: If one of them does not start.
        """
        try:
            # All at once: most of it is the time in which each imports its libraries.
            with ThreadPoolExecutor(world_size, f"start-{self._role}") as threads:
                starts = [threads.submit(self._start, number, world_size) for number in range(world_size)]
            self._ranks = [each.result() for each in starts if each.exception() is None]
            for each in starts:
                each.result()
            for number, process in enumerate(self._ranks):
                process.on_death(partial(self._rank_died, number))
            for answer in [self.call(number, "ready") for number in range(world_size)]:
                answer.result()
        except BaseException:
            self.close()
            raise

    def call(self, rank: int, method: str, *arguments: Any) -> "Future[Any]":
        """Call a method of a rank's server; see `RankTransport.call`."""
        answer: Future[Any] = Future()
        with self._lock:
            if self._death is not None:
                answer.set_exception(self._death)
                return answer
            if self._closed:
                raise RuntimeError("the ranks are closed")
            self._asked[answer] = rank
        called = self._ranks[rank].call(pack((method, arguments)))
        called.add_done_callback(lambda done: self._answered(rank, answer, done))
        return answer

    def close(self) -> None:
        """End all ranks, even in the middle of work, and return once they have exited. A second call does nothing."""
        with self._lock:
            self._closed = True
        for rank in self._ranks:
            self._end(rank)
        self._fail_all(RuntimeError("the ranks are closed"))
        self._ranks = []

    def _answered(self, rank: int, answer: "Future[Any]", called: "Future[bytes]") -> None:
        if (error := called.exception()) is not None:
            if isinstance(error, RoleDiedError):
                self._rank_died(rank, error)
            else:
                self._settle(answer, error=error)
            return
        done, content = unpack(called.result())
        if done:
            self._settle(answer, result=content)
        elif content.of_the_group:
            # Where a rank dies, the others fail because they miss it: the death is the answer, if there is one.
            timer = threading.Timer(_CAUSE_S, self._settle, (answer,), {"error": content.error})
            timer.daemon = True
            timer.start()
        else:
            self._settle(answer, error=content.error)

    def _rank_died(self, rank: int, died: RoleDiedError) -> None:
        with self._lock:
            if self._closed or self._death is not None:
                return
            self._death = RankDiedError(str(died), rank, self._role, **died.circumstances())
        self._fail_all(self._death)
        self._tell(self._death)

    def _settle(
        self, answer: "Future[Any]", *, result: Any = None, error: BaseException | None = None
    ) -> None:
        """Give a call its answer, unless it has one."""
        with self._lock:
            if self._asked.pop(answer, None) is None:
                return
        if error is None:
            answer.set_result(result)
        else:
            answer.set_exception(error)

    def _fail_all(self, error: BaseException) -> None:
        with self._lock:
            waiting = list(self._asked)
        for answer in waiting:
            self._settle(answer, error=error)
