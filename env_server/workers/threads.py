"""A bounded pool of threads whose calls can be given up."""

import asyncio
import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from env_server.workers.base import EnvironmentRaised, OperationTimeout


class _Call:
    """One call that a thread makes.

    Attributes:
        future: Where the outcome goes; whoever waits may give up.
        finished: Whether the call has been made, whoever waited.
    """

    __slots__ = ("_arguments", "_function", "_loop", "finished", "future")

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self._loop = asyncio.get_running_loop()
        self._function = function
        self._arguments = arguments
        self.future: asyncio.Future[Any] = self._loop.create_future()
        self.finished = False

    def run(self) -> None:
        """Make the call, in the thread."""
        try:
            result = self._function(*self._arguments)
        except EnvironmentRaised as error:
            self._tell(None, error)
        else:
            self._tell(result, None)

    def _tell(self, result: Any, error: EnvironmentRaised | None) -> None:
        # The loop is closed when a call outlives the server; nobody asks for its outcome then.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._finish, result, error)

    def _finish(self, result: Any, error: EnvironmentRaised | None) -> None:
        self.finished = True
        if self.future.done():
            return
        if error is None:
            self.future.set_result(result)
        else:
            self.future.set_exception(error)


class _Thread:
    """A thread that makes calls one after another until it is dismissed."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        # A thread that is stuck must not keep the server from ending.
        threading.Thread(target=self._work, name="environments", daemon=True).start()

    def put(self, call: _Call) -> None:
        """Make a call after those before it."""
        self._calls.put(call)

    def dismiss(self) -> None:
        """End the thread after the calls that it was given."""
        self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call.run()


class ThreadPool:
    """Makes calls in at most so many threads at a time.

    A call that takes too long cannot be interrupted: its thread is left to it, and a new one takes its place. When as
    many threads are stuck as the pool is large, no new ones are started until one comes back.

    Args:
        size: The largest number of threads, not counting those that are stuck.
    """

    def __init__(self, size: int) -> None:
        self.stuck = 0
        self._size = size
        self._threads = 0
        self._idle: list[_Thread] = []
        self._waiting: deque[asyncio.Future[_Thread]] = deque()

    async def run(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        timeout: float | None,
        given_up: Callable[[], None],
        timed: Callable[[float, float], None] | None = None,
    ) -> Any:
        """Make a call in a thread.

        Args:
            function: What to call; of its exceptions, only `EnvironmentRaised` is expected.
            arguments: What to call it with.
            timeout: How long it may take, once a thread is free.
            given_up: Called in a thread where nobody waits for the call any more: after it, or instead of it.
            timed: Told how long the call waited for a thread, and how long it took then.

        Raises:
            OperationTimeout: It took too long, or all threads are stuck.
        """
        asked = time.perf_counter()
        try:
            thread = await self._borrow()
        except (asyncio.CancelledError, OperationTimeout):
            spare = _Thread()
            spare.put(_Call(given_up, ()))
            spare.dismiss()
            raise
        call = _Call(function, arguments)
        began = time.perf_counter()
        thread.put(call)
        try:
            async with asyncio.timeout(timeout):
                return await call.future
        except TimeoutError:
            raise OperationTimeout(f"no answer within {timeout:g} s") from None
        finally:
            if timed is not None:
                timed(began - asked, time.perf_counter() - began)
            if call.finished:
                self._give_back(thread)
            else:
                self._leave(thread, given_up)

    def dismiss(self) -> None:
        """End the threads that are idle."""
        for thread in self._idle:
            thread.dismiss()
        self._threads -= len(self._idle)
        self._idle.clear()

    async def _borrow(self) -> _Thread:
        if self._idle:
            return self._idle.pop()
        if self._threads < self._size:
            return self._start_thread()
        waiter: asyncio.Future[_Thread] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.cancelled():
                with contextlib.suppress(ValueError):
                    self._waiting.remove(waiter)
            elif waiter.exception() is None:
                self._give_back(waiter.result())
            raise

    def _start_thread(self) -> _Thread:
        if self.stuck >= self._size:
            raise OperationTimeout(f"all {self.stuck} threads are stuck")
        self._threads += 1
        return _Thread()

    def _give_back(self, thread: _Thread) -> None:
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(thread)
                return
        self._idle.append(thread)

    def _leave(self, thread: _Thread, given_up: Callable[[], None]) -> None:
        """Leave a thread to its call, and let another one take its place."""
        self._threads -= 1
        self.stuck += 1
        last = _Call(given_up, ())
        last.future.add_done_callback(self._come_back)
        thread.put(last)
        thread.dismiss()
        while self._waiting and self._threads < self._size:
            waiter = self._waiting.popleft()
            if waiter.done():
                continue
            try:
                waiter.set_result(self._start_thread())
            except OperationTimeout as error:
                waiter.set_exception(error)

    def _come_back(self, last: "asyncio.Future[Any]") -> None:
        self.stuck -= 1
