"""A process of a role as the driver sees it, the ranks that are such processes, and its restart after a death."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from rollgym.trainer.backends.transport import RankDiedError, pack, unpack
from rollgym.trainer.cluster.supervision import RoleRestarts
from rollgym.trainer.core.errors import ConfigError, RoleDiedError, RoleLostError, RunError

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


Lost = Callable[[Exception], None]
"""Called in the event loop with the reason why a process cannot be restarted."""


class KeptProcess:
    """Holds a process, and restarts it whenever it dies.

    Args:
        role: The role's name.
        start: Starts a process that accepts calls.
        restarts: Says how long to wait before a restart, and when there were too many.
        lost: Notified when no restart is possible: the process died too often, or its machine has failed.
        say: Receives messages for people about deaths and restarts.

    Attributes:
        bring: Brings a restarted process to its predecessor's state, before it receives any other call.
    """

    def __init__(
        self,
        role: str,
        start: Callable[[], Awaitable[RoleProcess]],
        restarts: RoleRestarts,
        lost: Lost,
        say: Callable[[str], None],
    ) -> None:
        self.bring: Callable[[RoleProcess], Awaitable[None]] | None = None
        self._role = role
        self._start = start
        self._restarts = restarts
        self._lost = lost
        self._say = say
        self._process: RoleProcess | None = None
        self._restarting: asyncio.Task[None] | None = None

    @property
    def there(self) -> bool:
        """Whether the process is alive and accepts calls."""
        return self._process is not None and self._restarting is None

    async def open(self) -> None:
        """Start it for the first time.

        Raises:
            RoleDiedError: If it ends before it takes calls.
        """
        self._take(await self._start())

    async def living(self) -> RoleProcess:
        """Return the process, as soon as there is one.

        Raises:
            RoleLostError: If it died too often.
            RoleDiedError: If its machine has failed.
            RunError: If it was ended.
        """
        while self._restarting is not None:
            await asyncio.shield(self._restarting)
        if self._process is None:
            raise RunError(f"{self._role} has ended with the run")
        return self._process

    async def call(self, method: str, *arguments: Any) -> Any:
        """Send a call to the present process, and return its answer.

        Raises:
            RoleDiedError: If the process has died.
            TrainerError: The error that the call raised in the process.
        """
        process = await self.living()
        return await self.answer(process, pack((method, arguments)))

    async def answer(self, process: RoleProcess, data: bytes) -> Any:
        """Send a pickled call to the process, and return its answer; if the process has died, restart it.

        Raises:
            RoleDiedError: If the process has died.
            TrainerError: The error that the call raised in the process.
        """
        try:
            done, content = unpack(await asyncio.wrap_future(process.call(data)))
        except RoleDiedError as died:
            self.died(process, died)
            raise
        if not done:
            raise content
        return content

    def died(self, process: RoleProcess, died: RoleDiedError) -> None:
        """Restart a dead process; a second notification of the same death is ignored."""
        if process is not self._process or self._restarting is not None:
            return
        self._restarting = asyncio.ensure_future(self._restarted(died))
        # A waiting call receives the failure; if there is none, `lost` has received it.
        self._restarting.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def leave(self) -> RoleProcess | None:
        """Start nothing again, and give the process away, if there is one."""
        process, self._process = self._process, None
        if self._restarting is not None:
            self._restarting.cancel()
            await asyncio.gather(self._restarting, return_exceptions=True)
            self._restarting = None
        return process

    async def end(self) -> None:
        """Start nothing again, and end the process."""
        if (process := await self.leave()) is not None:
            await asyncio.to_thread(process.end)

    def _take(self, process: RoleProcess) -> None:
        self._process = process
        loop = asyncio.get_running_loop()

        def tell(died: RoleDiedError) -> None:
            with suppress(RuntimeError):  # the loop may be closed by now
                loop.call_soon_threadsafe(self.died, process, died)

        process.on_death(tell)

    async def _restarted(self, died: RoleDiedError) -> None:
        try:
            while True:
                if died.with_its_node:
                    raise died  # the whole run must find room for it elsewhere
                wait_s = self._restarts.wait_s(died)
                count = f"{self._restarts.in_a_row(self._role)} of {self._restarts.limit}"
                self._say(f"{died}")
                self._say(f"{self._role} is started again in {wait_s:g} s ({count})")
                if self._process is not None:
                    await asyncio.to_thread(self._process.end)  # one that only cannot be reached may live
                await asyncio.sleep(wait_s)
                try:
                    process = await self._started_as_before()
                    break
                except RoleDiedError as again:
                    died = again
                except (RunError, ConfigError) as error:
                    died = RoleDiedError(self._role, str(error))
            self._take(process)
            self._restarting = None
            self._say(f"{self._role} is back")
        except (RoleLostError, RoleDiedError) as error:
            self._lost(error)
            raise

    async def _started_as_before(self) -> RoleProcess:
        process = await self._start()
        if self.bring is not None:
            try:
                await self.bring(process)
            except BaseException:
                await asyncio.to_thread(process.end)
                raise
        return process
