"""Replies in the order of the stream: so many are sampled at once, and of those that wait the oldest group is first.

Who waits is served by age and not by arrival, because a step waits for its oldest groups: what they need is sampled
while the others' can wait. The engine is as busy either way, and the last episode of a step ends sooner.
"""

import asyncio
import heapq
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from trainer.inference.base import (
    GenerationRequest,
    GenerationResult,
    InferenceClient,
    InferenceCounters,
    InferenceHealth,
    InferenceUnavailableError,
    PauseMode,
    WeightSource,
)
from trainer.rollout.outages import OutageReport

T = TypeVar("T")

_FIRST_LOOK_S = 0.1
_RAREST_LOOK_S = 5.0


@dataclass(order=True, slots=True)
class _Waiting:
    order: tuple[int, ...]
    number: int
    granted: asyncio.Future[None] = field(compare=False)


class GenerationQueue:
    """An inference client that bounds how many replies are sampled at once, and waits where nobody samples.

    Args:
        client: What answers.
        limit: Replies that it samples at once; more requests wait here.
        outages: Told when nobody answers.
        patience_s: How long that is borne before the run ends.
    """

    def __init__(
        self,
        client: InferenceClient,
        limit: int,
        outages: OutageReport | None = None,
        patience_s: float = 300.0,
    ) -> None:
        self._client = client
        self._free = limit
        self._line: list[_Waiting] = []
        self._numbers = 0
        self._patience_s = patience_s
        self._tell = outages and outages.listener("inference", lambda: self._stranded + len(self._line))
        self._stranded = 0
        self._search: asyncio.Task[bool] | None = None
        self._gone_since: float | None = None

    @property
    def version(self) -> int:
        """The policy version that answers now."""
        return self._client.version

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Wait in line, and return the reply.

        Raises:
            InferenceUnavailableError: If nobody has sampled for longer than is borne.
        """
        if self._free:
            self._free -= 1
        else:
            await self._turn(request.order)
        try:
            return await self._answered(lambda: self._client.generate(request))
        finally:
            self._pass_on()

    async def generate_together(self, requests: list[GenerationRequest]) -> list[GenerationResult]:
        """Pass a batch that is already complete."""
        return await self._answered(lambda: self._client.generate_together(requests))

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        """Pass it on. Requests in line are not under way yet."""
        return await self._client.abort(request_ids)

    async def pause(self, mode: PauseMode) -> None:
        """Pass it on."""
        await self._client.pause(mode)

    async def resume(self) -> None:
        """Pass it on."""
        await self._client.resume()

    async def sync(self, source: WeightSource, version: int) -> None:
        """Pass new weights on, as soon as there is somebody to take them."""
        await self._answered(lambda: self._client.sync(source, version))

    async def health(self) -> InferenceHealth:
        """How the client behind is."""
        return await self._client.health()

    @property
    def counters(self) -> InferenceCounters:
        """What the client behind has done."""
        return self._client.counters

    async def close(self) -> None:
        """Close the client behind."""
        if self._search is not None:
            self._search.cancel()
        await self._client.close()

    async def _turn(self, order: tuple[int, ...]) -> None:
        self._numbers += 1
        entry = _Waiting(order, self._numbers, asyncio.get_running_loop().create_future())
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

    async def _answered(self, ask: Callable[[], Awaitable[T]]) -> T:
        while True:
            try:
                answer = await ask()
            except InferenceUnavailableError as error:
                self._stranded += 1
                try:
                    await self._somebody_is_back(error)
                finally:
                    self._stranded -= 1
            else:
                self._gone_since = None
                return answer

    async def _somebody_is_back(self, error: InferenceUnavailableError) -> None:
        """Wait with all others that were left without an answer; one task looks for all of them."""
        loop = asyncio.get_running_loop()
        if self._gone_since is None:
            self._gone_since = loop.time()
        if self._search is None or self._search.done():
            self._search = loop.create_task(self._look(error, self._gone_since + self._patience_s))
        if not await asyncio.shield(self._search):
            raise InferenceUnavailableError(
                f"no inference server has answered for {self._patience_s:.0f} s ({error})"
            ) from error

    async def _look(self, error: InferenceUnavailableError, until: float) -> bool:
        """Look ever more rarely whether somebody samples again: servers that are gone send no word."""
        if self._tell:
            self._tell(error)
        pause_s = _FIRST_LOOK_S
        try:
            async with asyncio.timeout_at(until):
                while True:
                    await asyncio.sleep(pause_s)
                    if await self._is_ready():
                        return True
                    pause_s = min(2 * pause_s, _RAREST_LOOK_S)
        except TimeoutError:
            return False
        finally:
            if self._tell:
                self._tell(None)

    async def _is_ready(self) -> bool:
        try:
            return (await self._client.health()).ready
        except ConnectionError:
            return False
