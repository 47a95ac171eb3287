"""Environments in Ray actors, wherever in the cluster these are."""

import asyncio
import functools
import itertools
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from rollgym.env_server.common.settings import RaySettings
from rollgym.env_server.workers import boundary
from rollgym.env_server.workers.base import (
    CallingWorker,
    EnvironmentRaised,
    EnvSource,
    NoWorker,
    OperationTimeout,
    Spaces,
    Verdict,
    WorkerLost,
)
from rollgym.env_server.workers.ray.cluster import WorkerCluster
from rollgym.env_server.workers.ray.pool import ActorLost, RayActor, RayPool, ScalingPolicy
from rollgym.env_server.workers.wire import read_space

# The number of actors that may die during one environment's operations before it is blamed.
_FORGIVEN_DEATHS = 3
_SCORES_PER_PROCESS = 8
_SCORE_TRIES = 3
_KNOWN_SPACES = 256


class _Place:
    """The place of an environment: its actor, its number there, and whether it has begun an episode there."""

    __slots__ = ("actor", "kwargs", "number", "played", "source")

    def __init__(self, actor: RayActor, number: int, source: EnvSource, kwargs: Mapping[str, Any]) -> None:
        self.actor = actor
        self.number = number
        self.source = source
        self.kwargs = kwargs
        self.played = False


class RayWorker(CallingWorker):
    """Runs environments in child processes of Ray actors.

    An actor replaces a child that hangs or dies. An actor that dies is replaced; its environments are lost. If other
    actors have less load, an environment moves there when its next episode begins, or while that waits for its turn.

    Args:
        pool: The actors.
    """

    isolation = "process"

    def __init__(self, pool: RayPool) -> None:
        super().__init__()
        self._pool = pool
        self._places: dict[str, _Place] = {}
        self._deaths: Counter[str] = Counter()
        self._numbers = itertools.count(1)
        self._space = functools.lru_cache(maxsize=_KNOWN_SPACES)(read_space)

    @property
    def trouble(self) -> str | None:
        """Why no environment can be made at present."""
        return self._pool.trouble

    async def start(self) -> None:
        """Connect to the cluster.

        Raises:
            ConfigurationError: There is none.
        """
        await self._pool.start()

    # -- environments --------------------------------------------------------------------------------------------

    async def make(
        self, key: str, source: EnvSource, kwargs: Mapping[str, Any], *, timeout: float | None
    ) -> Spaces:
        """Build an environment under a key, in the actor that holds the fewest."""
        self._let_go(key)
        kind = "make", source.target
        with self._pool.ends(kind, await self._pool.turn(kind)) as actor:
            action, observation = await self._make_at(actor, key, source, kwargs, timeout)
        return self._space(orjson.dumps(action)), self._space(orjson.dumps(observation))

    async def reset(
        self, key: str, seed: int | None, options: dict[str, Any] | None, *, timeout: float | None
    ) -> tuple[Any, Mapping[str, Any]]:
        """Begin an episode. An environment that has played before may have to be made elsewhere for that."""
        place = self._find(key)
        if place.played and self._pool.could_move(place.actor):
            self._let_go(key)
            raise WorkerLost("the environment goes to another actor")
        kind = "reset", place.source.target
        with self._pool.ends(kind, await self._pool.turn(kind, place.actor)) as actor:
            if actor is not place.actor:
                self._let_go(key)
                await self._make_at(actor, key, place.source, place.kwargs, timeout)
            self._find(key).played = True
            observation, info = await self._run(key, "reset", seed, options, timeout=timeout)
        return observation, info

    async def close(self, key: str) -> None:
        """Let an environment go; its actor closes it when it comes to that."""
        self._let_go(key)
        self._deaths.pop(key, None)

    async def _make_at(
        self,
        actor: RayActor,
        key: str,
        source: EnvSource,
        kwargs: Mapping[str, Any],
        timeout: float | None,
    ) -> Any:
        number = next(self._numbers)
        self._places[key] = _Place(actor, number, source, kwargs)
        actor.environments.add(number)
        try:
            return await self._run(key, "make", source, kwargs, timeout=timeout)
        except EnvironmentRaised:
            self._forget(key)
            raise

    def _find(self, key: str) -> _Place:
        place = self._places.get(key)
        if place is None:
            raise WorkerLost(f"there is no environment under {key}")
        return place

    async def _run(self, key: str, op: str, *arguments: Any, timeout: float | None) -> Any:
        place = self._find(key)
        actor, number = place.actor, place.number
        operation = actor.ask(op, (str(number), *arguments), environment=number, timeout=timeout)
        began = time.perf_counter()
        try:
            result = await operation.future
            self.times.ran[op].add(time.perf_counter() - began)
            return result
        except asyncio.CancelledError:
            if self._places.get(key) is place:
                actor.abandon(operation)
                self._let_go(key)
            raise
        except (OperationTimeout, WorkerLost) as error:
            if self._places.get(key) is place:
                self._forget(key)
            if isinstance(error, ActorLost):
                self._deaths[key] += 1
                error.at_fault = self._deaths[key] > _FORGIVEN_DEATHS
            raise

    def _let_go(self, key: str) -> None:
        """Close the environment under a key, if there is one."""
        if key in self._places:
            place = self._forget(key)
            place.actor.give_up(place.number)
            place.actor.tell("close", (str(place.number),))

    def _forget(self, key: str) -> _Place:
        place = self._places.pop(key)
        place.actor.environments.discard(place.number)
        return place

    # -- verifiers -----------------------------------------------------------------------------------------------

    async def verify(
        self, source: EnvSource, items: Sequence[Mapping[str, Any]], *, timeout: float | None
    ) -> list[Verdict]:
        """Score responses, spread over the actors."""
        return await asyncio.gather(*(self._score(source, item, timeout) for item in items))

    async def _score(self, source: EnvSource, item: Mapping[str, Any], timeout: float | None) -> Verdict:
        for _ in range(_SCORE_TRIES):
            try:
                actor = await self._pool.pick_scorer(_SCORES_PER_PROCESS)
            except NoWorker as error:
                return boundary.error_verdict(error)
            actor.scoring += 1
            operation = actor.ask("verify", (source, [item]), timeout=timeout)
            try:
                [verdict] = await operation.future
                return dict(verdict)
            except EnvironmentRaised as error:
                return boundary.error_verdict(error)
            except WorkerLost:
                continue
            except asyncio.CancelledError:
                actor.abandon(operation)
                raise
            finally:
                actor.scoring -= 1
                self._pool.scored()
        return {"score": 0.0, "outcome": "error", "detail": "the actors of the verifier died"}

    # -- the end -------------------------------------------------------------------------------------------------

    async def shutdown(self) -> None:
        """Let the actors close their environments, and end them."""
        await self._pool.shutdown()


def ray_worker(settings: RaySettings) -> RayWorker:
    """Build the worker that the operator's settings describe."""
    policy = ScalingPolicy(
        settings.ray_min_actors,
        settings.ray_max_actors,
        settings.ray_sessions_per_actor,
        settings.ray_operations_per_actor,
        settings.ray_idle_timeout_s,
        settings.ray_start_timeout_s,
    )
    cluster = WorkerCluster(settings.ray_address, settings.ray_working_dir)
    return RayWorker(RayPool(cluster, policy, settings.ray_num_cpus))
