"""The worker whose environments are on registered servers."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from rollgym.env_server.common.metrics import Metrics
from rollgym.env_server.gateway.registry import Registration, Registry, no_server
from rollgym.env_server.gateway.upstream.base import SessionUnknownError, UpstreamError
from rollgym.env_server.workers.base import (
    EnvironmentRaised,
    EnvSource,
    OperationTimeout,
    ServerFailed,
    ServerLost,
    Spaces,
    StepOutcome,
    Verdict,
    Worker,
    WorkerLost,
)

# A server that is started again registers again within this time, as a rule.
_PATIENCE_S = 15.0
# How long an operation that a server has not begun (unreachable, or asked to retry later) is retried.
_UNSENT_S = 5.0
_FIRST_PAUSE_S = 0.1
_GOODBYE_S = 10.0
_SAFE_TO_REPEAT = frozenset({"reset", "verify"})
# An abandoned call that creates something at a server is still awaited, so that its result can be closed: a make
# without limit, because only its answer names the session.
_MORE_TIME_S: Mapping[str, float | None] = {"make": None, "reset": 10.0}
_Result = TypeVar("_Result")
_log = logging.getLogger(__name__)


class RemoteWorker(Worker):
    """Passes operations on to the registered server that has the session.

    A server that fails loses its sessions here; their owner may have them rebuilt on another replica.

    Args:
        registry: The servers.
        metrics: Counts their times and failures.
    """

    isolation = "process"

    def __init__(self, registry: Registry, metrics: Metrics) -> None:
        super().__init__()
        self._registry = registry
        self._metrics = metrics
        self._homes: dict[str, Registration] = {}
        self._closing: dict[str, asyncio.Task[None]] = {}

    async def make(
        self, key: str, source: EnvSource, kwargs: Mapping[str, Any], *, timeout: float | None
    ) -> Spaces:
        """Make a session on the least loaded server."""
        await self.close(key)
        if (closing := self._closing.get(key)) is not None:
            # Some servers know sessions by our keys, and some have room for one only: first the end, then a new begin.
            await asyncio.wait([closing])
        home = await self._place(source.target)
        self._homes[key] = home
        return await self._run("make", key, home, lambda: home.upstream.make(key, kwargs, timeout=timeout))

    async def reset(
        self, key: str, seed: int | None, options: dict[str, Any] | None, *, timeout: float | None
    ) -> tuple[Any, Mapping[str, Any]]:
        """Begin an episode in the server's session."""
        home = self._home(key)
        return await self._run(
            "reset", key, home, lambda: home.upstream.reset(key, seed, options, timeout=timeout)
        )

    async def step(self, key: str, action: Any, *, timeout: float | None) -> StepOutcome:
        """Take a step in the server's session."""
        home = self._home(key)
        return await self._run("step", key, home, lambda: home.upstream.step(key, action, timeout=timeout))

    async def render(self, key: str, mode: str | None, *, timeout: float | None) -> Any:
        """Render the state of the server's session."""
        home = self._home(key)
        return await self._run("render", key, home, lambda: home.upstream.render(key, mode, timeout=timeout))

    async def reseed(self, key: str, seed: int, *, timeout: float | None) -> None:
        """Set a new seed for the random generator of the server's session."""
        home = self._home(key)
        await self._run("reseed", key, home, lambda: home.upstream.reseed(key, seed, timeout=timeout))

    async def verify(
        self, source: EnvSource, items: Sequence[Mapping[str, Any]], *, timeout: float | None
    ) -> list[Verdict]:
        """Score responses on the least loaded server."""
        home = await self._place(source.target)
        try:
            return await self._tried("verify", home, lambda: home.upstream.verify(items, timeout=timeout))
        except UpstreamError as error:
            if error.away:
                self._registry.failed(home)
            raise ServerLost(str(error), at_fault=True) from error
        finally:
            self._registry.released(home)

    async def close(self, key: str) -> None:
        """End a session at its server."""
        home = self._homes.pop(key, None)
        if home is not None:
            try:
                await self._end(key, home)
            finally:
                self._registry.released(home)

    async def shutdown(self) -> None:
        """Close the connections to all servers."""
        if self._closing:
            _, late = await asyncio.wait(self._closing.values(), timeout=_GOODBYE_S)
            for task in late:
                task.cancel()
        await self._registry.shutdown()

    async def _place(self, env_id: str) -> Registration:
        home = await self._registry.place(env_id, _PATIENCE_S)
        if home is None:
            raise no_server(env_id)
        return home

    def _home(self, key: str) -> Registration:
        home = self._homes.get(key)
        if home is None:
            raise WorkerLost(f"there is no environment under {key}")
        return home

    async def _run(
        self, op: str, key: str, home: Registration, call: Callable[[], Awaitable[_Result]]
    ) -> _Result:
        calling = asyncio.get_running_loop().create_task(self._tried(op, home, call))
        try:
            return await asyncio.shield(calling)
        except UpstreamError as error:
            if error.away:
                self._registry.failed(home)
            if op != "make" and _is_kept(home, error):
                raise ServerFailed(str(error)) from error
            self._forget(key, home)
            if not (error.away or isinstance(error, SessionUnknownError)):
                # It has the session still, and there will be another one.
                self._close_later(op, key, home, calling)
            raise ServerLost(str(error), at_fault=True) from error
        except (OperationTimeout, asyncio.CancelledError):
            # The server may still be working on it: it receives a close of the session.
            self._forget(key, home)
            self._close_later(op, key, home, calling)
            raise

    async def _tried(self, op: str, home: Registration, call: Callable[[], Awaitable[_Result]]) -> _Result:
        """Retry a repeatable operation once, and one that the server has certainly not begun for a while.

        A deterministic environment of a server that is away is better rebuilt, on a replica if there is one.
        """
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + _UNSENT_S
        pause_s = _FIRST_PAUSE_S
        once_more = op in _SAFE_TO_REPEAT
        while True:
            try:
                return await self._measured(op, home, call)
            except UpstreamError as error:
                waits = error.unsent and not (error.away and home.spec.deterministic)
                if not (once_more or waits) or loop.time() + pause_s > give_up_at:
                    raise
            once_more = False
            await asyncio.sleep(pause_s)
            pause_s *= 2

    async def _measured(self, op: str, home: Registration, call: Callable[[], Awaitable[_Result]]) -> _Result:
        began = time.perf_counter()
        try:
            return await call()
        except UpstreamError:
            self._metrics.upstream_errors[self._metrics.labels.of(home.env_id), home.protocol] += 1
            raise
        finally:
            self._metrics.upstream_seconds[op, home.protocol].add(time.perf_counter() - began)

    def _close_later(self, op: str, key: str, home: Registration, calling: "asyncio.Task[Any]") -> None:
        if home.upstream.ends_with_its_calls or op not in _MORE_TIME_S:
            calling.cancel()
        ending = self._end_after(calling, _MORE_TIME_S.get(op), key, home)
        task = self._closing[key] = asyncio.get_running_loop().create_task(ending)
        task.add_done_callback(lambda _: self._closing.pop(key))

    async def _end_after(
        self, calling: "asyncio.Task[Any]", patience_s: float | None, key: str, home: Registration
    ) -> None:
        """End a session once its last operation has ended."""
        await asyncio.wait([calling], timeout=patience_s)
        calling.cancel()
        # Its result is discarded.
        await asyncio.gather(calling, return_exceptions=True)
        await self._end(key, home)

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


def _is_kept(home: Registration, error: UpstreamError) -> bool:
    """Whether a session stays at its server: it cannot be rebuilt, and the server still has it."""
    return (
        home.upstream.keeps_sessions
        and not home.spec.deterministic
        and not isinstance(error, SessionUnknownError)
    )
