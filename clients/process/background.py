"""An event loop on a thread of its own, for those who call from plain code."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

_Result = TypeVar("_Result")


class BackgroundLoop:
    """Runs coroutines for plain code.

    The thread is a daemon, so that a program that forgets `close` still ends.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollgym-client", daemon=True)
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

    def close(self) -> None:
        """Stop the loop and its thread; closing again does nothing."""
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
