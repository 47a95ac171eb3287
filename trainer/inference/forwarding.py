"""Inference clients in front of another one: a base that forwards everything, and one that holds requests in a queue.

The queue limits how many are under way; of those that wait, the one of the smallest priority is next.
"""

import asyncio
import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from rollgym.trainer.inference.base import (
    GenerationRequest,
    GenerationResult,
    InferenceClient,
    InferenceCounters,
    InferenceHealth,
    PauseMode,
    WeightSource,
)


@dataclass(order=True, slots=True)
class _Waiting:
    """A waiting request; ordered by priority, then by arrival."""

    priority: int
    number: int
    granted: asyncio.Future[None] = field(compare=False)


class PrioritySemaphore:
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

    places: PrioritySemaphore
    priority: int

    async def __aenter__(self) -> None:
        await self.places.take(self.priority)

    async def __aexit__(self, *_: object) -> None:
        self.places.give()


class ForwardingClient:
    """Base of clients that change how replies are asked for, and nothing else; they define `generate`.

    Args:
        client: What answers.
    """

    def __init__(self, client: InferenceClient) -> None:
        self._client = client

    @property
    def version(self) -> int:
        """The policy version that answers now."""
        return self._client.version

    async def generate_together(self, requests: list[GenerationRequest]) -> list[GenerationResult]:
        """Pass a batch that is already complete."""
        return await self._client.generate_together(requests)

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        """Pass it on. Requests that wait here are not under way yet."""
        return await self._client.abort(request_ids)

    async def pause(self, mode: PauseMode) -> None:
        """Pause the client behind, in that mode."""
        await self._client.pause(mode)

    async def resume(self) -> None:
        """Resume generating in the client behind."""
        await self._client.resume()

    async def sync(self, source: WeightSource, version: int) -> None:
        """Pass new weights to the client behind."""
        await self._client.sync(source, version)

    async def health(self) -> InferenceHealth:
        """How the client behind is."""
        return await self._client.health()

    @property
    def counters(self) -> InferenceCounters:
        """What the client behind has done."""
        return self._client.counters

    async def close(self) -> None:
        """Close the client behind, which ends sampling."""
        await self._client.close()


class GenerationQueue(ForwardingClient):
    """Limits concurrent requests to a client; waiting ones proceed in the order of their training steps.

    Requests are ordered by the step that will train on them, and not by arrival alone: a step waits for its own groups,
    and those of later steps can be sampled meanwhile. The engine is as busy either way, and the last episode of a
    step ends sooner. Within a step all groups are waited for, so there the order is that of arrival: going by age, the
    youngest group's longest episode would begin last.

    Args:
        client: What answers.
        limit: Replies that it samples at once.
    """

    def __init__(self, client: InferenceClient, limit: int) -> None:
        super().__init__(client)
        self._places = PrioritySemaphore(limit)

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Wait for a place, and return the reply."""
        async with self._places.held(request.priority):
            return await self._client.generate(request)
