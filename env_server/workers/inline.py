"""Environments in this process: no thread, no await, no time-out."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollgym.env_server.common.metrics import LONG_S, TIMED_STEPS
from rollgym.env_server.workers import boundary
from rollgym.env_server.workers.base import (
    EnvironmentRaised,
    EnvSource,
    Spaces,
    StepOutcome,
    Verdict,
    Worker,
    WorkerLost,
)


class InlineWorker(Worker):
    """Runs fast and pure environments in the server's own process.

    The `..._now` methods are plain calls, for the hot path; the awaitable ones are the same, for code that does not
    care which worker it has. Time-outs are ignored: code that runs here cannot be interrupted.
    """

    isolation = "inline"

    def __init__(self) -> None:
        super().__init__()
        self._steps = 0
        self._step_times = self.times.ran["step"]
        self._environments: dict[str, boundary.Environment] = {}
        self._names: dict[str, str] = {}

    def make_now(self, key: str, source: EnvSource, kwargs: Mapping[str, Any]) -> Spaces:
        """Build an environment under a key, in place of the one there, if any."""
        self.close_now(key)
        self._names[key] = source.env_id
        try:
            spaces: Spaces = self._timed(key, "make", self._build, key, source, kwargs)
        except EnvironmentRaised:
            self.close_now(key)
            self._names.pop(key, None)
            raise
        return spaces

    def _build(self, key: str, source: EnvSource, kwargs: Mapping[str, Any]) -> Spaces:
        environment = self._environments[key] = boundary.build(source, kwargs)
        return boundary.spaces(environment)

    def reset_now(
        self, key: str, seed: int | None, options: dict[str, Any] | None
    ) -> tuple[Any, Mapping[str, Any]]:
        """Begin an episode, without awaiting."""
        outcome: tuple[Any, Mapping[str, Any]] = self._timed(
            key, "reset", boundary.reset, self._find(key), seed, options
        )
        return outcome

    def step_now(self, key: str, action: Any) -> StepOutcome:
        """Take a step, without awaiting."""
        environment = self._find(key)
        self._steps += 1
        began = time.perf_counter()
        try:
            return boundary.step(environment, action)
        except EnvironmentRaised as error:
            boundary.report(error, session_id=key)
            raise
        finally:
            seconds = time.perf_counter() - began
            if seconds >= LONG_S:
                self.times.note_long("step", self._names[key], seconds)
            if not self._steps % TIMED_STEPS:
                self._step_times.add(seconds, TIMED_STEPS)

    def render_now(self, key: str, mode: str | None) -> Any:
        """Render the current state, without awaiting."""
        return self._timed(key, "render", boundary.render, self._find(key), mode)

    def reseed_now(self, key: str, seed: int) -> None:
        """Set a new seed for the environment's random generator, without awaiting."""
        self._timed(key, "reseed", boundary.reseed, self._find(key), seed)

    def close_now(self, key: str) -> None:
        """Let an environment go, if there is one."""
        environment = self._environments.pop(key, None)
        if environment is not None:
            del self._names[key]
            boundary.close(environment)

    def _timed(self, key: str, op: str, function: Callable[..., Any], *arguments: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*arguments)
        except EnvironmentRaised as error:
            boundary.report(error, session_id=key)
            raise
        finally:
            seconds = time.perf_counter() - began
            self.times.ran[op].add(seconds)
            if seconds >= LONG_S:
                self.times.note_long(op, self._names[key], seconds)

    def _find(self, key: str) -> boundary.Environment:
        environment = self._environments.get(key)
        if environment is None:
            raise WorkerLost(f"there is no environment under {key}")
        return environment

    # -- the interface of every worker ---------------------------------------------------------------------------

    async def make(
        self, key: str, source: EnvSource, kwargs: Mapping[str, Any], *, timeout: float | None
    ) -> Spaces:
        """Build an environment under a key."""
        return self.make_now(key, source, kwargs)

    async def reset(
        self, key: str, seed: int | None, options: dict[str, Any] | None, *, timeout: float | None
    ) -> tuple[Any, Mapping[str, Any]]:
        """Begin an episode in an environment."""
        return self.reset_now(key, seed, options)

    async def step(self, key: str, action: Any, *, timeout: float | None) -> StepOutcome:
        """Take a step in an environment."""
        return self.step_now(key, action)

    async def render(self, key: str, mode: str | None, *, timeout: float | None) -> Any:
        """Render an environment's current state."""
        return self.render_now(key, mode)

    async def reseed(self, key: str, seed: int, *, timeout: float | None) -> None:
        """Set a new seed for an environment's random generator."""
        self.reseed_now(key, seed)

    async def verify(
        self, source: EnvSource, items: Sequence[Mapping[str, Any]], *, timeout: float | None
    ) -> list[Verdict]:
        """Score responses one after another."""
        environment = boundary.build(source, {})
        began = time.perf_counter()
        try:
            return [_verdict(environment, item) for item in items]
        finally:
            seconds = time.perf_counter() - began
            if seconds >= LONG_S:
                self.times.note_long("verify", source.env_id, seconds)
            boundary.close(environment)

    async def close(self, key: str) -> None:
        """Close an environment and drop it."""
        self.close_now(key)

    async def shutdown(self) -> None:
        """Close all environments of the worker."""
        for key in list(self._environments):
            self.close_now(key)


def _verdict(environment: boundary.Environment, item: Mapping[str, Any]) -> Verdict:
    try:
        return boundary.score(environment, item)
    except EnvironmentRaised as error:
        boundary.report(error)
        return boundary.error_verdict(error)
