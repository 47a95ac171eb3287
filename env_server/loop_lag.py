"""How late the event loop comes to what it should have done."""

import asyncio
import time

from env_server.durations import Durations

_INTERVAL_S = 0.5


class LoopLag:
    """Sets a timer again and again, and counts how late each one came.

    Whatever keeps the loop busy, such as a slow environment that runs inline, keeps everybody else waiting for as long.

    Args:
        durations: Where it is counted.
    """

    def __init__(self, durations: Durations) -> None:
        self._durations = durations
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to look."""
        # Not the loop's clock: that stands still while the loop is busy.
        self._due = time.perf_counter() + _INTERVAL_S
        self._timer = asyncio.get_running_loop().call_later(_INTERVAL_S, self._look)

    def stop(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        self._durations.add(max(0.0, time.perf_counter() - self._due))
        self.start()
