"""An event loop on a thread of its own, for callers from synchronous code."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

_Result = TypeVar("_Result")


class BackgroundLoop:
    """Runs coroutines for plain code.

    The thread is a daemon, so that a program that forgets `close` still ends.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._is_left = threading.Event()
        # The thread must not hold this object, or the object would never be garbage-collected.
        self._thread = threading.Thread(
            target=_work, args=(self._loop, self._is_left), name="rollgym-client", daemon=True
        )
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        """Run a coroutine to its end and return its result; an interrupt of the caller cancels it.

        Raises:
            RuntimeError: The loop was closed.
        """
        if self._loop.is_closed():
            coroutine.close()
            raise RuntimeError("this environment is closed; make another one")
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def end_with(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a last coroutine, and stop the loop and its thread after it; nothing waits for that."""

        def begin() -> None:
            task = self._loop.create_task(last())
            task.add_done_callback(lambda _: self._loop.stop())

        if not self._loop.is_closed():
            self._is_left.set()
            self._loop.call_soon_threadsafe(begin)

    def join(self, timeout_s: float) -> None:
        """Wait until the loop has stopped, but no longer than the time-out."""
        self._thread.join(timeout_s)

    def close(self) -> None:
        """Stop the loop and its thread; closing again does nothing."""
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _work(loop: asyncio.AbstractEventLoop, is_left: threading.Event) -> None:
    loop.run_forever()
    if is_left.is_set():
        loop.close()
