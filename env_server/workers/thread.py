"""Environments in threads of this process: for those that mostly wait for disks, networks or other processes.

The threads are of a bounded pool, whose calls can be given up.
"""

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from rollgym.env_server.common.event_loop import is_given_up
from rollgym.env_server.common.metrics import LONG_S
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

_CLOSE_TIMEOUT_S = 10.0

_log = logging.getLogger(__name__)


class _Call:
    """One call that a thread makes.

    Attributes:
        future: Receives the outcome; the waiting task may cancel it.
        timeout: How long it may take once it has a thread.
        given_up: Called in a thread once the call is abandoned: after the function, or instead of it.
        timed: Called with how long it waited for a thread, and how long it then ran.
        thread: Its thread, from when it has one until it returns or is abandoned.
        timer: Fires at its deadline.
    """

    __slots__ = (
        "_arguments",
        "_asked",
        "_began",
        "_function",
        "_loop",
        "_taken",
        "future",
        "given_up",
        "thread",
        "timed",
        "timeout",
        "timer",
    )

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        timeout: float | None,
        given_up: Callable[[], None],
        timed: Callable[[float, float], None] | None,
        taken: "Callable[[_Call], None]",
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._function = function
        self._arguments = arguments
        self._taken = taken
        self._asked = self._began = time.perf_counter()
        self.future: asyncio.Future[Any] = self._loop.create_future()
        self.timeout = timeout
        self.given_up = given_up
        self.timed = timed
        self.thread: _Thread | None = None
        self.timer: asyncio.TimerHandle | None = None

    def begin(self, thread: "_Thread") -> None:
        """Run the call in a thread."""
        self.thread = thread
        self._began = time.perf_counter()
        thread.put(self.run)

    def run(self) -> None:
        """Make the call, in the thread."""
        try:
            result = self._function(*self._arguments)
        except EnvironmentRaised as error:
            _tell(self._loop, self._finish, None, error)
        else:
            _tell(self._loop, self._finish, result, None)

    def _finish(self, result: Any, error: EnvironmentRaised | None) -> None:
        if self.future.done():
            # It was given up, and its thread knows.
            return
        self._taken(self)
        if error is None:
            self.future.set_result(result)
        else:
            self.future.set_exception(error)

    def leave_thread(self) -> "_Thread":
        """Record its time, and release its thread."""
        assert self.thread is not None
        if self.timer is not None:
            self.timer.cancel()
        if self.timed is not None:
            self.timed(self._began - self._asked, time.perf_counter() - self._began)
        thread, self.thread = self.thread, None
        return thread


def _tell(loop: asyncio.AbstractEventLoop, callback: Callable[..., Any], *arguments: Any) -> None:
    # The loop is closed if a call outlives the server; no task waits for its outcome then.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(callback, *arguments)


class _Thread:
    """A thread that makes calls one after another until it is dismissed."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # A thread that is stuck must not keep the server from ending.
        threading.Thread(target=self._work, name="environments", daemon=True).start()

    def put(self, call: Callable[[], None]) -> None:
        """Make a call after those before it."""
        self._calls.put(call)

    def dismiss(self) -> None:
        """End the thread after the calls that it was given."""
        self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()


class ThreadPool:
    """Makes calls in a bounded number of threads.

    A call that takes too long cannot be interrupted: it keeps its thread, and a new thread replaces that in the pool.
    When as many threads are stuck as the pool is large, no new ones are started until one comes back; calls wait for
    that, up to their time-out.

    Args:
        size: The largest number of threads, not counting those that are stuck.
    """

    def __init__(self, size: int) -> None:
        self.stuck = 0
        self._size = size
        self._threads = 0
        self._idle: list[_Thread] = []
        self._waiting: deque[_Call] = deque()

    def call(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        timeout: float | None,
        given_up: Callable[[], None],
        timed: Callable[[float, float], None] | None = None,
    ) -> "asyncio.Future[Any]":
        """Make a call in a thread, now or when one is free.

        Args:
            function: The function to call; of its exceptions, only `EnvironmentRaised` is expected.
            arguments: Its arguments.
            timeout: How long it may take, once a thread is free.
            given_up: Called in a thread if the call took too long or was cancelled: after the function, or instead of
                it.
            timed: Called with how long the call waited for a thread, and how long it then ran.

        Returns:
            A future of the outcome. Cancelling it abandons the call; if the outcome is already there, `given_up` is not
            called. It raises `OperationTimeout` if the call took too long, and `NoWorker` if all threads were stuck for
            that long, or if no thread can be started.
        """
        call = _Call(function, arguments, timeout, given_up, timed, self._made)
        call.future.add_done_callback(partial(self._cancelled, call))
        if self._idle:
            self._begin(call, self._idle.pop())
        else:
            self._waiting.append(call)
            self._serve_waiting()
        return call.future

    def dismiss(self) -> None:
        """End the threads that are idle."""
        for thread in self._idle:
            thread.dismiss()
        self._threads -= len(self._idle)
        self._idle.clear()

    def _serve_waiting(self) -> None:
        """Start threads for waiting calls, if more are allowed."""
        while self._waiting and self._threads < self._size and self.stuck < self._size:
            call = self._waiting.popleft()
            if call.future.done():
                continue
            try:
                thread = _Thread()
            except RuntimeError as error:
                # The system has no more.
                self._refuse(call, f"no thread can be started: {error}")
                continue
            self._threads += 1
            self._begin(call, thread)
        if not self._threads:
            for call in self._waiting:
                self._limit(call)

    def _begin(self, call: _Call, thread: _Thread) -> None:
        if call.timer is not None:
            call.timer.cancel()
            call.timer = None
        call.begin(thread)
        self._limit(call)

    def _limit(self, call: _Call) -> None:
        if call.timer is None and call.timeout is not None:
            call.timer = asyncio.get_running_loop().call_later(call.timeout, self._took_too_long, call)

    def _made(self, call: _Call) -> None:
        """Take a thread back whose call was made and waited for."""
        thread = call.leave_thread()
        while self._waiting:
            waiting = self._waiting.popleft()
            if not waiting.future.done():
                self._begin(waiting, thread)
                return
        self._idle.append(thread)

    def _took_too_long(self, call: _Call) -> None:
        if call.future.done():
            return
        if call.thread is None:
            self._waiting.remove(call)
            self._refuse(call, f"all {self.stuck} threads are stuck")
            return
        self._leave(call)
        call.future.set_exception(OperationTimeout(f"no answer within {call.timeout:g} s"))

    def _cancelled(self, call: _Call, future: "asyncio.Future[Any]") -> None:
        if not future.cancelled():
            return
        if call.thread is not None:
            self._leave(call)
            return
        with contextlib.suppress(ValueError):
            self._waiting.remove(call)
        _give_up(call)

    def _refuse(self, call: _Call, why: str) -> None:
        call.future.set_exception(NoWorker(why))
        _give_up(call)

    def _leave(self, call: _Call) -> None:
        """Leave a thread to its call, and let another one take its place."""
        thread = call.leave_thread()
        self._threads -= 1
        self.stuck += 1
        loop = asyncio.get_running_loop()
        thread.put(call.given_up)
        thread.put(partial(_tell, loop, self._come_back))
        thread.dismiss()
        self._serve_waiting()

    def _come_back(self) -> None:
        self.stuck -= 1
        self._serve_waiting()


def _give_up(call: _Call) -> None:
    """Run the `given_up` of a call that will not be made; the pool may have no free thread for that."""
    try:
        spare = _Thread()
    except RuntimeError as error:
        _log.error("what a call was to leave behind is not closed, since no thread can be started: %s", error)
        return
    spare.put(call.given_up)
    spare.dismiss()


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
