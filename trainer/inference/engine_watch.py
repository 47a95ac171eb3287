"""Watches the engine behind a server's front: a live front answers even if the engine is dead or hangs."""

import asyncio
from collections.abc import Awaitable, Callable


class EngineWatch:
    """Sends an engine health checks that it must answer itself, one at a time, so that they never pile up.

    Args:
        ask: Asks it, and returns when anything was answered, or nothing can be.
        patience_s: How long an engine may take to answer, control calls aside: it may compile for a new batch shape.
    """

    def __init__(self, ask: Callable[[], Awaitable[object]], patience_s: float) -> None:
        self._ask = ask
        self._patience_s = patience_s
        self._question: asyncio.Future[object] | None = None
        self._asked_at = 0.0

    def look(self, *, steered: bool) -> bool:
        """Return whether the engine has been silent for too long; once it has answered, ask the next question.

        Args:
            steered: Whether a control call (pause, load and the like) is in flight: the engine answers nothing else
                until that is done.
        """
        now = asyncio.get_running_loop().time()
        if steered:
            self.rest()
        elif self._question is None or self._question.done():
            self._question, self._asked_at = asyncio.ensure_future(self._ask()), now
        return self._question is not None and now - self._asked_at >= self._patience_s

    def rest(self) -> None:
        """Cancel the question in flight; the next `look` asks again."""
        if self._question is not None:
            self._question.cancel()
            self._question = None
