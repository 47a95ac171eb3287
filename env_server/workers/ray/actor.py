"""One Ray actor, as its I/O process sees it."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

from rollgym.env_server.workers.base import WorkerLost
from rollgym.env_server.workers.ray.cluster import RayCluster
from rollgym.env_server.workers.ray.scaling import Average
from rollgym.env_server.workers.ray.wire import UNANSWERED, Request, dump_requests, load_answers

# Two calls may wait at the actor for answers while a third is in flight; later operations go with the next call.
_CALLS_IN_FLIGHT = 3
_MAX_NUMBER = 2**32
# How many seconds of an actor's work may be sent in advance.
_MOMENT_S = 0.1
_SHORTEST_S = 1e-4
# Enough that a child process never waits for the next one.
_MOST_TOGETHER = 4
_NEWEST = 0.2


Beginning = tuple[str, str]
"""A make or a reset, with its environment: a kind of operation that takes about as long each time."""


class ActorLost(WorkerLost):
    """A whole actor is gone, with the operations of many environments: the operation at fault is unknown."""


class Operation(NamedTuple):
    """An operation that was sent to an actor.

    Attributes:
        number: The number of its answer.
        environment: The number of the environment that it is on, or -1.
        future: Receives its result.
    """

    number: int
    environment: int
    future: "asyncio.Future[Any]"


class RayActor:
    """Starts an actor, sends it operations, and ends it.

    Operations of one turn of the event loop go in one call. At least one call is in flight at all times, so that the
    end of the actor is noticed at once.

    Args:
        cluster: The cluster that runs it.
        num_cpus: The CPUs that it reserves.
        processes: Its child processes.
        changed: Called when it is ready, and when it has ended.
    """

    def __init__(
        self,
        cluster: RayCluster,
        num_cpus: float,
        processes: int,
        changed: "Callable[[RayActor], None]",
    ) -> None:
        self.processes = processes
        self.environments: set[int] = set()
        self.scoring = 0
        self.beginning = 0
        self.ready = False
        self.alive = True
        self.failed = False
        self.released = False
        self.why_ended = ""
        self._loop = asyncio.get_running_loop()
        self.started = self.unneeded_since = self._loop.time()
        self.average = Average(self.started)
        self._paces_s: dict[Beginning, float] = {}
        self._ended_at = self.started
        self.where = "no node"
        self._cluster = cluster
        self._changed = changed
        self._operations: dict[int, Operation] = {}
        self._unsent: list[Request] = []
        self._flushing = False
        self._in_flight = 0
        self._number = UNANSWERED
        self._handle = cluster.start_host(num_cpus, processes)
        self._call("hello").add_done_callback(self._greeted)

    @property
    def load(self) -> int:
        """Operations that it has not answered."""
        return len(self._operations)

    # -- beginning -----------------------------------------------------------------------------------------------

    def has_turn(self, kind: Beginning) -> bool:
        """Whether another environment may be made or reset here now.

        An operation that waits in a child process cannot move to another actor. So only as many are sent together as
        start within a moment: slow ones then wait in the pool, which can give them to another actor, and fast ones do
        not go one by one.
        """
        pace_s = self._paces_s.get(kind, _MOMENT_S)
        together = min(_MOST_TOGETHER, int(_MOMENT_S / pace_s)) if pace_s > _SHORTEST_S else _MOST_TOGETHER
        return self.ready and self.beginning < self.processes * max(1, together)

    def begins(self) -> float:
        """Note that an environment is about to be made or reset; return the time."""
        self.beginning += 1
        return self._loop.time()

    def ended_beginning(self, kind: Beginning, began: float) -> None:
        """Note that one has been, and how long others waited for it; longer than before counts at once."""
        self.beginning -= 1
        now = self._loop.time()
        took, self._ended_at = now - max(began, self._ended_at), now
        before = self._paces_s.get(kind, took)
        self._paces_s[kind] = took if took > before else before + _NEWEST * (took - before)

    # -- asking --------------------------------------------------------------------------------------------------

    def ask(
        self, op: str, arguments: tuple[Any, ...], *, environment: int = -1, timeout: float | None
    ) -> Operation:
        """Send an operation; its future raises like the worker's method."""
        self._number = self._number % (_MAX_NUMBER - 1) + 1
        operation = Operation(self._number, environment, self._loop.create_future())
        if not self.alive:
            operation.future.set_exception(WorkerLost(self.why_ended))
            return operation
        self._operations[operation.number] = operation
        self.average.change(self.load, self._loop.time())
        self._send(Request(operation.number, op, arguments, timeout))
        return operation

    def tell(self, op: str, arguments: tuple[Any, ...]) -> None:
        """Send an operation whose result is discarded."""
        if self.alive:
            self._send(Request(UNANSWERED, op, arguments, None))

    def abandon(self, operation: Operation) -> None:
        """Stop waiting for an operation."""
        if self._operations.pop(operation.number, None) is not None:
            self.average.change(self.load, self._loop.time())
            self.tell("cancel", (operation.number,))

    def give_up(self, environment: int) -> None:
        """Fail the operation on an environment, if one runs, because the environment is gone."""
        for operation in [each for each in self._operations.values() if each.environment == environment]:
            self.abandon(operation)
            if not operation.future.done():
                operation.future.set_exception(WorkerLost("the environment was closed"))

    def _send(self, request: Request) -> None:
        self._unsent.append(request)
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    # -- calls ---------------------------------------------------------------------------------------------------

    def _call(self, method: str, *arguments: Any) -> "asyncio.Future[Any]":
        return self._cluster.call(self._handle, method, *arguments)

    def _greeted(self, called: "asyncio.Future[Any]") -> None:
        try:
            self.where = called.result()
        except WorkerLost as lost:
            self.failed = self.alive
            self.end(f"a Ray actor did not start: {lost}")
            return
        self.ready = True
        self._exchange()
        self._changed(self)

    def _flush(self) -> None:
        self._flushing = False
        if self._unsent and self.alive and self.ready and self._in_flight < _CALLS_IN_FLIGHT:
            self._exchange()

    def _exchange(self) -> None:
        self._in_flight += 1
        content = dump_requests(self._unsent)
        self._unsent.clear()
        self._call("exchange", content).add_done_callback(self._returned)

    def _returned(self, called: "asyncio.Future[Any]") -> None:
        self._in_flight -= 1
        try:
            content: bytes = called.result()
        except WorkerLost as lost:
            self.end(str(lost))
            return
        if not self.alive:
            return
        for number, result, failure in load_answers(content):
            operation = self._operations.pop(number, None)
            if operation is None or operation.future.done():
                continue
            if failure is None:
                operation.future.set_result(result)
            else:
                operation.future.set_exception(failure)
        self.average.change(self.load, self._loop.time())
        # Operations that the answers cause in this turn of the event loop can go with the next call.
        if self._unsent or not self._in_flight:
            self._flushing = True
            self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        self._flushing = False
        if self.alive and (self._unsent or not self._in_flight):
            self._exchange()

    # -- the end -------------------------------------------------------------------------------------------------

    def end(self, reason: str) -> None:
        """End the actor, or note that it has ended; its pending operations fail."""
        if not self.alive:
            return
        self.alive = False
        self.why_ended = reason
        self._cluster.kill(self._handle)
        operations = list(self._operations.values())
        self._operations.clear()
        for operation in operations:
            if not operation.future.done():
                operation.future.set_exception(ActorLost(reason))
        self._changed(self)

    async def stop(self, grace_s: float) -> None:
        """Let the actor close its environments, and end it."""
        if self.alive and self.ready:
            with contextlib.suppress(WorkerLost, TimeoutError):
                await asyncio.wait_for(self._call("stop"), grace_s)
        self.end("the server stops")
