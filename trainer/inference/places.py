"""A priority semaphore: limits concurrent requests; the waiting one with the smallest priority is next."""

import asyncio
import heapq
from dataclasses import dataclass, field


@dataclass(order=True, slots=True)
class _Waiting:
    """A waiting request; ordered by priority, then by arrival."""

    priority: int
    number: int
    granted: asyncio.Future[None] = field(compare=False)


class OrderedPlaces:
    """A semaphore whose waiting requests are ordered by priority.

    Args:
        limit: Requests that may be under way at one time.
    """

    def __init__(self, limit: int) -> None:
        self._free = limit
        self._line: list[_Waiting] = []
        self._numbers = 0

    def held(self, priority: int) -> "_Held":
        """Hold a place while the context is open; of those that wait, the smallest `priority` is next."""
        return _Held(self, priority)

    async def take(self, priority: int) -> None:
        """Take a place, as soon as there is one."""
        if self._free:
            self._free -= 1
        else:
            await self._turn(priority)

    async def _turn(self, priority: int) -> None:
        self._numbers += 1
        entry = _Waiting(priority, self._numbers, asyncio.get_running_loop().create_future())
        heapq.heappush(self._line, entry)
        try:
            await entry.granted
        except asyncio.CancelledError:
            if not entry.granted.cancelled():
                self.give()  # its turn came at that moment
            raise

    def give(self) -> None:
        """Give a free place to the next waiting request, if any."""
        while self._line:
            entry = heapq.heappop(self._line)
            if not entry.granted.done():
                entry.granted.set_result(None)
                return
        self._free += 1


@dataclass(frozen=True, slots=True)
class _Held:
    """A place from entry to exit. A class and not a generator: every reply passes through it."""

    places: OrderedPlaces
    priority: int

    async def __aenter__(self) -> None:
        await self.places.take(self.priority)

    async def __aexit__(self, *_: object) -> None:
        self.places.give()
