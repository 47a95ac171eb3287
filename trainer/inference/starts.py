"""Servers of a run that are restarting: deadlines of calls to them are extended meanwhile."""

import asyncio
from collections.abc import Callable
from math import inf


class Starts:
    """Servers that have exited and are being restarted.

    Attributes:
        changed: Called when one begins to start, and when it answers or never will.
    """

    def __init__(self) -> None:
        self.changed: Callable[[], None] = lambda: None
        self._under_way: set[str] = set()
        self._last_end = -inf

    def begin(self, url: str) -> None:
        """A server has ended, and is started again."""
        self._under_way.add(url)
        self.changed()

    def end(self, url: str) -> None:
        """It answers, or is not started any more."""
        self._under_way.discard(url)
        self._last_end = asyncio.get_running_loop().time()
        self.changed()

    def deadline(self, deadline: float, patience_s: float) -> float | None:
        """Return until when servers are waited for, by the clock of the event loop; None while one starts.

        Args:
            deadline: Until when, had none been started.
            patience_s: How long they are waited for once one has started: it is sent its weights then.
        """
        return None if self._under_way else max(deadline, self._last_end + patience_s)
