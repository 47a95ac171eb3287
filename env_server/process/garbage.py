"""Garbage collections when the event loop has nothing to do: one of all objects delays everybody on this process."""

import asyncio
import gc
import time
from collections.abc import Callable

from rollgym.clients.measuring.metrics import queued_seconds

_LOOK_S = 0.1
# The loop has nothing to do if its thread runs, or waits for a processor, for less than this share of the time.
_IDLE_SHARE = 0.1
# As often as Python itself collects by default, in collections of the middle generation.
_DUE = 10
# Without such a moment, Python itself collects after so many: memory does not grow without bound.
_OVERDUE = 50
# Collections of a large process take long: they are so much rarer.
_MOST_OF_TIME = 0.005


class IdleCollections:
    """Has all objects examined when the loop has nothing to do, and never those that start-up has made.

    Those live as long as the process. Young objects are examined as ever, which is quick.

    Used as a context manager, in the thread of the loop, once everything that stays is made.

    Args:
        used_s: For how long that thread has run or waited for a processor, in seconds.
    """

    def __init__(self, used_s: Callable[[], float] | None = None) -> None:
        self._used_s = used_s or _used_s
        self._thresholds = gc.get_threshold()
        self._timer: asyncio.TimerHandle | None = None
        self._since = self._used = 0.0

    def __enter__(self) -> "IdleCollections":
        gc.collect()
        gc.freeze()
        young, middle, _ = self._thresholds
        gc.set_threshold(young, middle, _OVERDUE)
        self._arm(_LOOK_S)
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        gc.set_threshold(*self._thresholds)

    def _arm(self, after_s: float) -> None:
        self._since, self._used = time.perf_counter(), self._used_s()
        self._timer = asyncio.get_running_loop().call_later(after_s, self._look)

    def _look(self) -> None:
        after_s = _LOOK_S
        if gc.get_count()[2] >= _DUE and self._is_idle():
            begun = time.perf_counter()
            gc.collect()
            after_s = max(after_s, (time.perf_counter() - begun) / _MOST_OF_TIME)
        self._arm(after_s)

    def _is_idle(self) -> bool:
        passed = time.perf_counter() - self._since
        return self._used_s() - self._used < _IDLE_SHARE * passed


def _used_s() -> float:
    return time.thread_time() + (queued_seconds() or 0.0)
