"""Environments in threads of this process: for those that mostly wait for disks, networks or other processes."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from rollgym.env_server.common.event_loop import is_given_up
from rollgym.env_server.telemetry.durations import LONG_S
from rollgym.env_server.workers import boundary
from rollgym.env_server.workers.base import (
    EnvironmentRaised,
    EnvSource,
    NoWorker,
    OperationTimeout,
    Spaces,
    StepOutcome,
    Verdict,
    Worker,
    WorkerLost,
)
from rollgym.env_server.workers.thread_pool import ThreadPool

_CLOSE_TIMEOUT_S = 10.0
_log = logging.getLogger(__name__)


class _Home:
    """An environment, the threads that run it, and the operation in progress."""

    __slots__ = ("env_id", "environment", "own", "pool", "running")

    def __init__(self, env_id: str, pool: ThreadPool, *, own: bool = False) -> None:
        self.env_id = env_id
        self.environment: boundary.Environment | None = None
        self.pool = pool
        self.own = own
        self.running: asyncio.Future[Any] | None = None

    def build(self, source: EnvSource, kwargs: Mapping[str, Any]) -> Spaces:
        """Build the environment, in a thread."""
        self.environment = boundary.build(source, kwargs)
        return boundary.spaces(self.environment)

    def score(self, source: EnvSource, item: Mapping[str, Any]) -> Verdict:
        """Build a verifier and score one response with it, in a thread."""
        self.environment = boundary.build(source, {})
        try:
            return boundary.score(self.environment, item)
        finally:
            self.clear()

    def closed(self, closing: "asyncio.Future[Any]") -> None:
        """Release the environment's own thread, if it has one."""
        if not closing.cancelled():
            # One that takes too long keeps its thread.
            closing.exception()
        if self.own:
            self.pool.dismiss()

    def clear(self) -> None:
        """Close the environment, in a thread."""
        environment, self.environment = self.environment, None
        if environment is not None:
            boundary.close(environment)


class ThreadWorker(Worker):
    """Runs environments in a bounded pool of threads, or in a thread of their own if they need one.

    Args:
        max_threads: The size of the pool.
    """

    isolation = "thread"

    def __init__(self, max_threads: int) -> None:
        super().__init__()
        self._pool = ThreadPool(max_threads)
        self._homes: dict[str, _Home] = {}

    @property
    def stuck(self) -> int:
        """How many threads of the pool are left to calls that took too long."""
        return self._pool.stuck

    async def make(
        self, key: str, source: EnvSource, kwargs: Mapping[str, Any], *, timeout: float | None
    ) -> Spaces:
        """Build an environment under a key."""
        await self.close(key)
        home = self._homes[key] = (
            _Home(source.env_id, ThreadPool(1), own=True)
            if source.pinned_thread
            else _Home(source.env_id, self._pool)
        )
        try:
            spaces: Spaces = await self._run(key, "make", home.build, source, kwargs, timeout=timeout)
        except EnvironmentRaised:
            await self.close(key)
            raise
        return spaces

    async def reset(
        self, key: str, seed: int | None, options: dict[str, Any] | None, *, timeout: float | None
    ) -> tuple[Any, Mapping[str, Any]]:
        """Begin an episode in an environment."""
        observation, info = await self._call(key, "reset", boundary.reset, seed, options, timeout=timeout)
        return observation, info

    async def step(self, key: str, action: Any, *, timeout: float | None) -> StepOutcome:
        """Take a step in an environment."""
        outcome: StepOutcome = await self._call(key, "step", boundary.step, action, timeout=timeout)
        return outcome

    async def render(self, key: str, mode: str | None, *, timeout: float | None) -> Any:
        """Render an environment's current state."""
        return await self._call(key, "render", boundary.render, mode, timeout=timeout)

    async def reseed(self, key: str, seed: int, *, timeout: float | None) -> None:
        """Set a new seed for an environment's random generator."""
        await self._call(key, "reseed", boundary.reseed, seed, timeout=timeout)

    async def _call(
        self, key: str, op: str, function: Callable[..., Any], *arguments: Any, timeout: float | None
    ) -> Any:
        home = self._homes.get(key)
        if home is None:
            raise WorkerLost(f"there is no environment under {key}")
        return await self._run(key, op, function, home.environment, *arguments, timeout=timeout)

    async def _run(
        self, key: str, op: str, function: Callable[..., Any], *arguments: Any, timeout: float | None
    ) -> Any:
        home = self._homes[key]
        running = home.running = home.pool.call(
            function,
            *arguments,
            timeout=timeout,
            given_up=home.clear,
            timed=partial(self._took, op, home.env_id),
        )
        try:
            return await running
        except EnvironmentRaised as error:
            boundary.report(error, session_id=key)
            raise
        except OperationTimeout:
            self._forget(key, home)
            raise
        except asyncio.CancelledError:
            if not is_given_up():
                raise WorkerLost("the environment was closed") from None
            if self._homes.get(key) is home:
                del self._homes[key]
                self._end(home)
            raise
        finally:
            home.running = None

    def _forget(self, key: str, home: _Home) -> None:
        if self._homes.get(key) is home:
            del self._homes[key]

    @staticmethod
    def _end(home: _Home) -> "asyncio.Future[Any] | None":
        """Close an environment; return its future, unless a running operation has to close it at its end."""
        running = home.running
        if running is not None and (
            running.cancel() or running.cancelled() or isinstance(running.exception(), OperationTimeout)
        ):
            return None
        closing = home.pool.call(home.clear, timeout=_CLOSE_TIMEOUT_S, given_up=home.clear)
        closing.add_done_callback(home.closed)
        return closing

    def _took(self, op: str, env_id: str, waited: float, ran: float) -> None:
        self.times.waited[op].add(waited)
        self.times.ran[op].add(ran)
        if ran >= LONG_S:
            self.times.note_long(op, env_id, ran)

    async def verify(
        self, source: EnvSource, items: Sequence[Mapping[str, Any]], *, timeout: float | None
    ) -> list[Verdict]:
        """Score responses, each with a verifier of its own: one that takes too long keeps its verifier."""
        return await asyncio.gather(*(self._score(source, item, timeout) for item in items))

    async def _score(self, source: EnvSource, item: Mapping[str, Any], timeout: float | None) -> Verdict:
        home = _Home(source.env_id, self._pool)
        try:
            verdict: Verdict = await self._pool.call(
                home.score,
                *(source, item),
                timeout=timeout,
                given_up=home.clear,
                timed=partial(self._took, "verify", source.env_id),
            )
            return verdict
        except EnvironmentRaised as error:
            boundary.report(error, env_id=source.env_id)
            return boundary.error_verdict(error)
        except NoWorker as error:
            _log.error("verify of %s: %s", source.env_id, error, extra={"env_id": source.env_id})
            return boundary.error_verdict(error)
        except OperationTimeout as error:
            _log.warning("verify of %s: %s", source.env_id, error, extra={"env_id": source.env_id})
            return {"score": 0.0, "outcome": "timeout", "detail": str(error)}

    async def close(self, key: str) -> None:
        """Let an environment go; one that runs is closed when its call comes to an end."""
        home = self._homes.pop(key, None)
        if home is None:
            return
        closing = self._end(home)
        if closing is not None:
            # One that takes too long keeps its thread, which is counted as stuck.
            await asyncio.wait((closing,))

    async def shutdown(self) -> None:
        """Close the environments and let the threads go; those that are stuck end with the process."""
        await asyncio.gather(*(self.close(key) for key in list(self._homes)))
        self._pool.dismiss()
