"""So many requests at once, and of those that wait the one of smallest priority is next."""

import asyncio
import heapq
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


@dataclass(order=True, slots=True)
class _Waiting:
    """One that waits; by priority, then whoever came first."""

    priority: int
    number: int
    granted: asyncio.Future[None] = field(compare=False)


class OrderedPlaces:
    """Places for so many requests.

    Args:
        limit: Requests that may be under way at one time.
    """

    def __init__(self, limit: int) -> None:
        self._free = limit
        self._line: list[_Waiting] = []
        self._numbers = 0

    @asynccontextmanager
    async def held(self, priority: int) -> AsyncIterator[None]:
        """Hold a place while the context is open; of those that wait, the smallest `priority` is next."""
        if self._free:
            self._free -= 1
        else:
            await self._turn(priority)
        try:
            yield
        finally:
            self._pass_on()

    async def _turn(self, priority: int) -> None:
        self._numbers += 1
        entry = _Waiting(priority, self._numbers, asyncio.get_running_loop().create_future())
        heapq.heappush(self._line, entry)
        try:
            await entry.granted
        except asyncio.CancelledError:
            if not entry.granted.cancelled():
                self._pass_on()  # its turn came at that moment
            raise

    def _pass_on(self) -> None:
        while self._line:
            entry = heapq.heappop(self._line)
            if not entry.granted.done():
                entry.granted.set_result(None)
                return
        self._free += 1
