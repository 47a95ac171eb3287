"""The worker whose environments are on registered servers."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from env_server.gateway.registry import Registration, Registry
from env_server.gateway.upstream import UpstreamError
from env_server.metrics import Metrics
from env_server.workers.base import (
    EnvironmentRaised,
    EnvSource,
    OperationTimeout,
    ServerLost,
    Spaces,
    StepOutcome,
    Verdict,
    Worker,
    WorkerLost,
)

# A server that is started again registers again within this time, as a rule.
_PATIENCE_S = 15.0
_Result = TypeVar("_Result")
_log = logging.getLogger(__name__)


class RemoteWorker(Worker):
    """Passes operations on to the registered server that has the session.

    A server that fails loses its sessions here; whoever owns them may have them rebuilt, on another replica.

    Args:
        registry: The servers.
        metrics: Where their times and failures are counted.
    """

    isolation = "process"

    def __init__(self, registry: Registry, metrics: Metrics) -> None:
        super().__init__()
        self._registry = registry
        self._metrics = metrics
        self._homes: dict[str, Registration] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def make(
        self, key: str, source: EnvSource, kwargs: Mapping[str, Any], *, timeout: float | None
    ) -> Spaces:
        """Make a session on the least loaded server."""
        await self.close(key)
        home = await self._place(source.target)
        self._homes[key] = home
        return await self._run("make", key, home, lambda: home.upstream.make(key, kwargs, timeout=timeout))

    async def reset(
        self, key: str, seed: int | None, options: dict[str, Any] | None, *, timeout: float | None
    ) -> tuple[Any, Mapping[str, Any]]:
        """Begin an episode."""
        home = self._home(key)
        return await self._run(
            "reset", key, home, lambda: home.upstream.reset(key, seed, options, timeout=timeout)
        )

    async def step(self, key: str, action: Any, *, timeout: float | None) -> StepOutcome:
        """Take a step."""
        home = self._home(key)
        return await self._run("step", key, home, lambda: home.upstream.step(key, action, timeout=timeout))

    async def render(self, key: str, mode: str | None, *, timeout: float | None) -> Any:
        """Draw the state."""
        home = self._home(key)
        return await self._run("render", key, home, lambda: home.upstream.render(key, mode, timeout=timeout))

    async def reseed(self, key: str, seed: int, *, timeout: float | None) -> None:
        """Seed the environment's generator anew."""
        home = self._home(key)
        await self._run("reseed", key, home, lambda: home.upstream.reseed(key, seed, timeout=timeout))

    async def verify(
        self, source: EnvSource, items: Sequence[Mapping[str, Any]], *, timeout: float | None
    ) -> list[Verdict]:
        """Score responses on the least loaded server."""
        home = await self._place(source.target)
        try:
            return await self._measured("verify", home, lambda: home.upstream.verify(items, timeout=timeout))
        except UpstreamError as error:
            self._registry.failed(home)
            raise ServerLost(str(error), at_fault=True) from error
        finally:
            self._registry.released(home)

    async def close(self, key: str) -> None:
        """End a session."""
        home = self._homes.pop(key, None)
        if home is not None:
            try:
                await self._end(key, home)
            finally:
                self._registry.released(home)

    async def shutdown(self) -> None:
        """Let go of all servers."""
        await asyncio.gather(*self._closing)
        await self._registry.shutdown()

    async def _place(self, env_id: str) -> Registration:
        home = await self._registry.place(env_id, _PATIENCE_S)
        if home is None:
            raise ServerLost(f"no registered server has {env_id} at present", at_fault=True)
        return home

    def _home(self, key: str) -> Registration:
        home = self._homes.get(key)
        if home is None:
            raise WorkerLost(f"there is no environment under {key}")
        return home

    async def _run(
        self, op: str, key: str, home: Registration, call: Callable[[], Awaitable[_Result]]
    ) -> _Result:
        try:
            return await self._measured(op, home, call)
        except UpstreamError as error:
            self._registry.failed(home)
            self._forget(key, home)
            raise ServerLost(str(error), at_fault=True) from error
        except (OperationTimeout, asyncio.CancelledError):
            # The server may still be at it: it is told that nobody waits for it.
            self._forget(key, home)
            self._close_later(key, home)
            raise

    async def _measured(self, op: str, home: Registration, call: Callable[[], Awaitable[_Result]]) -> _Result:
        began = time.perf_counter()
        try:
            return await call()
        except UpstreamError:
            self._metrics.upstream_errors[self._metrics.labels.of(home.env_id), home.protocol] += 1
            raise
        finally:
            self._metrics.upstream_seconds[op, home.protocol].add(time.perf_counter() - began)

    def _close_later(self, key: str, home: Registration) -> None:
        task = asyncio.get_running_loop().create_task(self._end(key, home))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _end(self, key: str, home: Registration) -> None:
        try:
            await home.upstream.close(key)
        except (UpstreamError, EnvironmentRaised, OperationTimeout) as error:
            # If it is there at all, its own idle time-out ends the session.
            _log.info("session %s was not closed at %s: %s", key, home.target.url, error)

    def _forget(self, key: str, home: Registration) -> None:
        if self._homes.get(key) is home:
            del self._homes[key]
            self._registry.released(home)
