"""A bounded pool of threads whose calls can be given up."""

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from rollgym.env_server.workers.base import EnvironmentRaised, NoWorker, OperationTimeout

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
