"""Outage notices for people: which environment server is unreachable, for how long, and who waits."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Protocol

_UNMENTIONED_S = 2.0
"""A server that is back so soon, such as one that restarts, is not worth a word."""
_FIRST_REMINDER_S = 15.0


class OutageConsole(Protocol):
    """The console that prints outage notices."""

    @property
    def live(self) -> bool:
        """Whether a line can be changed once it is drawn."""
        ...

    def say(self, text: str) -> None:
        """Print `text` as one line."""
        ...

    def explain(self, text: str) -> None:
        """Print a sentence, broken between words if it is wider than the terminal."""
        ...

    def status(self, text: str | None) -> None:
        """Replace the status line by `text`; None removes it."""
        ...


class OutageReport:
    """Reports servers that cannot be reached: a live counter in a terminal, elsewhere ever rarer lines.

    Args:
        console: Where notices are printed.
        patience_s: How long to wait for a server.
    """

    def __init__(self, console: OutageConsole, patience_s: float) -> None:
        self._console = console
        self._patience_s = patience_s
        self._counting: dict[str, asyncio.Task[None]] = {}

    @property
    def any(self) -> bool:
        """Whether any server is unreachable now."""
        return bool(self._counting)

    def listener(self, address: str, waiting: Callable[[], int]) -> Callable[[Exception | None], None]:
        """Return what a client calls when it loses its server, and when it has it again.

        Args:
            address: The server.
            waiting: Number of episodes that wait for it.
        """
        return partial(self._heard, address, waiting)

    def close(self) -> None:
        """Stop the live counter and its task."""
        for counting in self._counting.values():
            counting.cancel()
        self._counting.clear()

    def _heard(self, address: str, waiting: Callable[[], int], error: Exception | None) -> None:
        before = self._counting.pop(address, None)
        if before is not None:
            before.cancel()
        if error is not None:
            count = self._count(address, waiting, error)
            self._counting[address] = asyncio.get_running_loop().create_task(count)

    async def _count(self, address: str, waiting: Callable[[], int], error: Exception) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        reminder_s = _UNMENTIONED_S
        try:
            while True:
                await asyncio.sleep(1.0)
                gone_s = loop.time() - began
                if gone_s < reminder_s and not self._console.live:
                    continue
                found = f"{address} has not answered for {gone_s:.0f} s, {waiting()} episodes wait"
                then = f"the run is saved and ends after {self._patience_s:.0f} s ({error})"
                if self._console.live:
                    self._console.status(f"{found};\n{then}")
                else:
                    self._console.say(found)
                    self._console.explain(then)
                reminder_s = max(_FIRST_REMINDER_S, 2 * reminder_s)
        finally:
            if self._console.live:
                self._console.status(None)
            if reminder_s > _UNMENTIONED_S:
                self._console.say(f"environment server {address} was gone for {loop.time() - began:.0f} s")
