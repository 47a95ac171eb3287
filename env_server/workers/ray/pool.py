"""The Ray actors of one I/O process: as many as the load requires."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from rollgym.env_server.workers.base import NoWorker
from rollgym.env_server.workers.ray.actor import Beginning, RayActor
from rollgym.env_server.workers.ray.cluster import RayCluster
from rollgym.env_server.workers.ray.scaling import Average, ScalingPolicy

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

_log = logging.getLogger(__name__)


class RayPool:
    """Starts actors when the load rises, and releases actors that have been idle for long.

    The oldest actors are kept. Surplus actors get no new environments, and so become idle.

    Args:
        cluster: The cluster that runs the actors.
        policy: Decides how many actors to run.
        num_cpus: The CPUs that each reserves; it has as many child processes, and at least one.
    """

    def __init__(self, cluster: RayCluster, policy: ScalingPolicy, num_cpus: float) -> None:
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
