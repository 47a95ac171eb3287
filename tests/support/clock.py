"""An event loop whose clock a test sets forward: what waits for minutes is there at once."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from functools import partial
from typing import Any

_TURNS = 10


class ClockLoop(asyncio.SelectorEventLoop):
    """The machine's clock and whatever the test has added to it, or, where it is `frozen`, only that."""

    def __init__(self, *, frozen: bool = False) -> None:
        self._frozen = frozen
        self._ahead_s = 0.0
        super().__init__()

    def time(self) -> float:
        return self._ahead_s if self._frozen else super().time() + self._ahead_s

    async def forward(self, seconds: float) -> None:
        """Set the clock forward, and let what is due then run."""
        self._ahead_s += seconds
        for _ in range(_TURNS):
            await asyncio.sleep(0)


def on_a_clock(body: Coroutine[Any, Any, None], *, frozen: bool = False) -> None:
    """Run a test whose time is its own."""
    with asyncio.Runner(loop_factory=partial(ClockLoop, frozen=frozen)) as runner:
        runner.run(body)


def clock() -> ClockLoop:
    """The loop of such a test."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, ClockLoop)
    return loop
