"""The Ray actors of one I/O process: each as this process sees it, and as many as the load requires."""

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from rollgym.env_server.workers.base import NoWorker, WorkerLost
from rollgym.env_server.workers.ray.cluster import WorkerCluster
from rollgym.env_server.workers.ray.host import UNANSWERED, ActorRequest, dump_requests, load_answers

# Two calls may wait at the actor for answers while a third is in flight; later operations go with the next call.
_CALLS_IN_FLIGHT = 3
_MAX_NUMBER = 2**32
# How many seconds of an actor's work may be sent in advance.
_MOMENT_S = 0.1
_SHORTEST_S = 1e-4
# Enough that a child process never waits for the next one.
_MOST_TOGETHER = 4
_NEWEST = 0.2
_LOOK_EVERY_S = 1.0
_LOOK_TIMEOUT_S = 5.0
# How much the last second counts in the average of operations.
_WEIGHT = 0.5
# Sessions wait this long for a starting actor, before they crowd the running ones.
_PATIENCE_S = 10.0
# One that has not started by then waits for a node, or for others to release their CPUs.
_SLOW_START_S = 30.0
_STOP_GRACE_S = 5.0
_FIRST_BACKOFF_S = 0.25
_MAX_BACKOFF_S = 10.0
Beginning = tuple[str, str]
"""A make or a reset, with its environment: a kind of operation that takes about as long each time."""
_log = logging.getLogger(__name__)


class ScalingPolicy(NamedTuple):
    """The operator's settings for the number of actors.

    Attributes:
        min_actors: The minimum number of actors.
        max_actors: The maximum number of actors.
        sessions_per_actor: The target number of sessions for one actor.
        operations_per_actor: The target average of running and waiting operations for one actor.
        idle_timeout_s: An actor is released after so many seconds without need.
        start_timeout_s: An environment waits at most so many seconds for an actor.
    """

    min_actors: int
    max_actors: int
    sessions_per_actor: int
    operations_per_actor: float
    idle_timeout_s: float
    start_timeout_s: float

    def wanted(self, sessions: int, operations: float) -> int:
        """The number of actors for a load.

        Args:
            sessions: Sessions that there are or that are being made.
            operations: Operations that are running or waiting, on average over the last seconds.
        """
        for_sessions = math.ceil(sessions / self.sessions_per_actor)
        # The small remainder of a decaying average does not count as load.
        for_operations = math.ceil(operations / self.operations_per_actor - 1e-3)
        return min(self.max_actors, max(self.min_actors, for_sessions, for_operations))


class Average:
    """The mean of a number that changes now and then, over the last seconds.

    Args:
        now: The time at which it is 0.
    """

    def __init__(self, now: float) -> None:
        self.value = 0.0
        self._area = 0.0
        self._current = 0
        self._changed = now
        self._looked = now

    def change(self, current: int, now: float) -> None:
        """Note the number's new value."""
        self._area += self._current * (now - self._changed)
        self._current = current
        self._changed = now

    def look(self, now: float, weight: float) -> float:
        """Update the running mean with the average since the last look, by a weight; return it."""
        self.change(self._current, now)
        if now > self._looked:
            self.value += weight * (self._area / (now - self._looked) - self.value)
            self._looked = now
            self._area = 0.0
        return self.value


class ActorLost(WorkerLost):
    """A whole actor is gone, with the operations of many environments: the operation at fault is unknown."""


class ActorOperation(NamedTuple):
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
        cluster: WorkerCluster,
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
        self._operations: dict[int, ActorOperation] = {}
        self._unsent: list[ActorRequest] = []
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
    ) -> ActorOperation:
        """Send an operation; its future raises like the worker's method."""
        self._number = self._number % (_MAX_NUMBER - 1) + 1
        operation = ActorOperation(self._number, environment, self._loop.create_future())
        if not self.alive:
            operation.future.set_exception(WorkerLost(self.why_ended))
            return operation
        self._operations[operation.number] = operation
        self.average.change(self.load, self._loop.time())
        self._send(ActorRequest(operation.number, op, arguments, timeout))
        return operation

    def tell(self, op: str, arguments: tuple[Any, ...]) -> None:
        """Send an operation whose result is discarded."""
        if self.alive:
            self._send(ActorRequest(UNANSWERED, op, arguments, None))

    def abandon(self, operation: ActorOperation) -> None:
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

    def _send(self, request: ActorRequest) -> None:
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


class RayPool:
    """Starts actors when the load rises, and releases actors that have been idle for long.

    The oldest actors are kept. Surplus actors get no new environments, and so become idle.

    Args:
        cluster: The cluster that runs the actors.
        policy: Decides how many actors to run.
        num_cpus: The CPUs that each reserves; it has as many child processes, and at least one.
    """

    def __init__(self, cluster: WorkerCluster, policy: ScalingPolicy, num_cpus: float) -> None:
        self.actors: list[RayActor] = []
        self._cluster = cluster
        self._policy = policy
        self._num_cpus = num_cpus
        self._making = 0
        self._waiting = 0
        self._queue = Average(asyncio.get_running_loop().time())
        self._operations = 0.0
        self._news = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._failed_starts = 0
        self._resume_at = 0.0
        self._warned = False
        self._stopping = False
        self._node_trouble: str | None = None
        self._looking: asyncio.Future[bool] | None = None
        self._looking_since = 0.0

    async def start(self) -> None:
        """Connect, and start the minimum number of actors.

        Raises:
            ConfigurationError: No cluster was found.
        """
        await self._cluster.connect()
        self._look()

    @property
    def trouble(self) -> str | None:
        """Why no environment can be made at present; None if one can."""
        if self._node_trouble is not None:
            return self._node_trouble
        if self._failed_starts and not self._ready():
            return "Ray actors end before they are ready; the log says more"
        return None

    # -- choosing ------------------------------------------------------------------------------------------------

    async def turn(self, kind: Beginning, here: RayActor | None = None) -> RayActor:
        """Reserve an actor to make an environment, or to begin an episode, now; `ends` releases it.

        Waiting callers count as load, for which actors are started; each gets the first actor that has room.

        Args:
            kind: The kind of operation to run there.
            here: The actor that holds the environment, if any; it is preferred.

        Raises:
            NoWorker: No actor was ready in time.
        """
        self._making += here is None
        self._wait(1)
        give_up_at = asyncio.get_running_loop().time() + self._policy.start_timeout_s
        try:
            async with asyncio.timeout_at(give_up_at) as limit:
                while True:
                    self._grow()
                    actor = self._with_turn(kind, here)
                    if actor is not None:
                        return actor
                    # Those that are there come to it in the end; it would wait for as long in a child process.
                    limit.reschedule(None if self._ready() else give_up_at)
                    await self._next_news()
        except TimeoutError:
            raise self._none_ready() from None
        finally:
            self._making -= here is None
            self._wait(-1)

    @contextmanager
    def ends(self, kind: Beginning, actor: RayActor) -> Iterator[RayActor]:
        """Use a reserved turn at an actor, and wake the waiting callers at its end."""
        began = actor.begins()
        try:
            yield actor
        finally:
            actor.ended_beginning(kind, began)
            self._news.set()

    def _with_turn(self, kind: Beginning, here: RayActor | None) -> RayActor | None:
        if here is None:
            return self._roomiest(kind)
        if here.has_turn(kind) or not here.alive:
            # A caller learns of the actor's end from its next operation.
            return here
        free = [actor for actor in self._ready() if actor.has_turn(kind)]
        return min(free, key=_fullness, default=None)

    async def pick_scorer(self, scores_per_process: int) -> RayActor:
        """The ready actor that scores fewest responses, as soon as one scores few enough.

        Raises:
            NoWorker: None was ready in time.
        """
        self._wait(1)
        try:
            async with asyncio.timeout(self._policy.start_timeout_s) as limit:
                while True:
                    self._grow()
                    ready = self._ready()
                    if ready:
                        # Those that are there come to it in the end.
                        limit.reschedule(None)
                        actor = min(ready, key=lambda each: each.scoring / each.processes)
                        if actor.scoring < scores_per_process * actor.processes:
                            return actor
                    await self._next_news()
        except TimeoutError:
            raise self._none_ready() from None
        finally:
            self._wait(-1)

    def _none_ready(self) -> NoWorker:
        return NoWorker(
            f"no Ray actor was ready in {self._policy.start_timeout_s:g} s: each asks for {self._num_cpus:g} CPUs "
            "(ray_num_cpus)"
        )

    def _wait(self, change: int) -> None:
        self._waiting += change
        self._queue.change(self._waiting, asyncio.get_running_loop().time())

    def scored(self) -> None:
        """Note that an actor may have room for a response."""
        self._news.set()

    def could_move(self, actor: RayActor) -> bool:
        """Whether an environment should move to another actor; it must be possible to make it again without loss."""
        now = asyncio.get_running_loop().time()
        kept = self._ready()[: self._wanted()]
        if actor not in kept:
            return bool(kept) and now - actor.unneeded_since > self._policy.idle_timeout_s
        return actor.average.value > self._policy.operations_per_actor and any(
            len(each.environments) < len(actor.environments) - 1 for each in kept
        )

    def _ready(self) -> list[RayActor]:
        return [actor for actor in self.actors if actor.ready]

    def _wanted(self) -> int:
        sessions = sum(len(actor.environments) for actor in self.actors)
        wanted = self._policy.wanted(sessions + self._making, self._operations)
        # If no actor could be started, one more try shows whether that still fails.
        return max(1, wanted) if self._waiting or self._failed_starts else wanted

    def _roomiest(self, kind: Beginning) -> RayActor | None:
        """The actor with the fewest environments that has a turn, unless one that starts is worth waiting for."""
        ready = self._ready()
        kept = ready[: self._wanted()]
        # Those that are about to be released are better than none.
        free = [actor for actor in kept if actor.has_turn(kind)] or [
            actor for actor in ready if actor.has_turn(kind)
        ]
        if not free:
            return None
        best = min(free, key=_fullness)
        now = asyncio.get_running_loop().time()
        starting = [now - actor.started for actor in self.actors if not actor.ready]
        full = (
            len(best.environments) >= self._policy.sessions_per_actor
            or best.average.value > self._policy.operations_per_actor
        )
        return None if full and starting and max(starting) < _PATIENCE_S else best

    async def _next_news(self) -> None:
        self._news.clear()
        await self._news.wait()

    # -- growing and shrinking -----------------------------------------------------------------------------------

    def _grow(self) -> None:
        now = asyncio.get_running_loop().time()
        while not self._stopping and now >= self._resume_at and len(self.actors) < self._wanted():
            self.actors.append(
                RayActor(self._cluster, self._num_cpus, max(1, int(self._num_cpus)), self._changed)
            )

    def _look(self) -> None:
        """Bring the number of actors up to date, once a second."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        queues = [self._queue, *(actor.average for actor in self.actors)]
        self._operations = sum(queue.look(now, _WEIGHT) for queue in queues)
        self._look_at_node(now)
        self._grow()
        self._shrink(now)
        self._warn(now)
        # Those that wait for an actor may have lost their patience.
        self._news.set()
        self._timer = loop.call_later(_LOOK_EVERY_S, self._look)

    def _look_at_node(self, now: float) -> None:
        """Ask Ray whether this process's own node is alive: Ray takes long to report its death to callers of actors."""
        looking = self._looking
        if looking is not None and not looking.done():
            if now - self._looking_since > _LOOK_TIMEOUT_S:
                self._note_node("Ray does not answer")
            return
        if looking is not None:
            self._note_node(None if looking.result() else "the Ray node of this process is gone")
        self._looking, self._looking_since = self._cluster.look_at_node(), now

    def _note_node(self, trouble: str | None) -> None:
        if trouble is not None and trouble != self._node_trouble:
            _log.error("%s", trouble)
        self._node_trouble = trouble

    def _shrink(self, now: float) -> None:
        wanted = self._wanted()
        for position, actor in reversed(list(enumerate(self.actors))):
            if position < wanted:
                actor.unneeded_since = now
            elif (
                not actor.environments
                and not actor.load
                and now - actor.unneeded_since > self._policy.idle_timeout_s
            ):
                actor.released = True
                actor.end("it is not needed any more")

    def _warn(self, now: float) -> None:
        late = sum(not actor.ready and now - actor.started > _SLOW_START_S for actor in self.actors)
        if late and not self._warned:
            _log.warning("%d Ray actors wait for %g CPUs each (ray_num_cpus)", late, self._num_cpus)
        self._warned = late > 0

    def _changed(self, actor: RayActor) -> None:
        self._news.set()
        self.actors.remove(actor)
        if actor.alive:
            # Those that are ready come first, the oldest of them before the others.
            self.actors.insert(len(self._ready()), actor)
            self._failed_starts = 0
            _log.info("a Ray actor has started on %s; there are %d", actor.where, len(self._ready()))
            return
        if self._stopping:
            return
        if not actor.failed:
            level = logging.INFO if actor.released else logging.WARNING
            count = len(self._ready())
            _log.log(
                level, "the Ray actor on %s ended: %s; there are %d", actor.where, actor.why_ended, count
            )
        else:
            # One that dies before it is ready is likely to do so again.
            backoff = min(_MAX_BACKOFF_S, _FIRST_BACKOFF_S * 2**self._failed_starts)
            self._failed_starts += 1
            self._resume_at = asyncio.get_running_loop().time() + backoff
            _log.error("%s; next try in %g s", actor.why_ended, backoff)

    # -- the end -------------------------------------------------------------------------------------------------

    async def shutdown(self) -> None:
        """End the actors, and leave the cluster."""
        self._stopping = True
        if self._timer is not None:
            self._timer.cancel()
        await asyncio.gather(*(actor.stop(_STOP_GRACE_S) for actor in list(self.actors)))
        await self._cluster.disconnect()


def _fullness(actor: RayActor) -> tuple[int, int]:
    return len(actor.environments), actor.load
