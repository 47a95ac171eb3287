"""Answers that a peer does not read."""

import asyncio
import math
from collections.abc import Callable


class UnreadAnswers:
    """Ends a connection whose peer reads nothing of its answers: it would be held for ever, and what waits with it.

    Args:
        transport: The connection.
        patience_s: How long the peer may read nothing.
        is_paused: Whether nothing more is written until it reads.
    """

    def __init__(
        self, transport: asyncio.Transport, patience_s: float, is_paused: Callable[[], bool]
    ) -> None:
        self._transport = transport
        self._patience_s = patience_s
        self._is_paused = is_paused
        self._size = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def watch(self) -> None:
        """Watch until all that was written is read, or at least in the kernel's hands."""
        if self._timer is None and self._transport.get_write_buffer_size():
            self._arm(math.inf)

    def resumed(self) -> None:
        """Note that so much was read that more is written: what waits later says nothing of what waited before."""
        self._size = math.inf

    def stop(self) -> None:
        """Watch no longer."""
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self, size: float) -> None:
        self._size = size
        self._timer = asyncio.get_running_loop().call_later(self._patience_s, self._look)

    def _look(self) -> None:
        self._timer = None
        size = self._transport.get_write_buffer_size()
        if not size:
            return
        # As long as more is written, the size does not say whether anything was read.
        if not (self._is_paused() or self._transport.is_closing()):
            self._arm(math.inf)
        elif size < self._size:
            self._arm(size)
        else:
            self._transport.abort()
