"""Makes generation reproducible: all running episodes ask, then one batch in fixed order answers.

Floating-point sums depend on who shares a batch. In deterministic mode a batch therefore holds exactly one request of
every running episode, sorted by (group, member, turn), so two runs make equal batches whatever the environments'
latencies were.
"""

import asyncio
from collections.abc import Mapping

from torch import Tensor

from trainer.inference.base import GenerationRequest, GenerationResult, InferenceClient
from trainer.rollout.scheduler import EpisodeSlots


class _Wave:
    """The requests of one batch while it fills, and the task that answers it once it is full."""

    def __init__(self) -> None:
        self.requests: list[GenerationRequest] = []
        self.full = asyncio.Event()
        self.answer: asyncio.Task[dict[str, GenerationResult]] | None = None


class WaveGate(EpisodeSlots):
    """An inference client that waits until every running episode has asked.

    Episodes must say `enter` before their first request and `leave` when they end, however they end.
    """

    def __init__(self, client: InferenceClient) -> None:
        self._client = client
        self._running = 0
        self._wave = _Wave()

    @property
    def version(self) -> int:
        """The policy version that answers now."""
        return self._client.version

    def enter(self) -> None:
        """An episode starts."""
        self._running += 1

    def leave(self) -> None:
        """An episode ended; the others may have been waiting for it."""
        self._running -= 1
        self._send_if_full()

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Wait for the wave and return this request's reply."""
        wave = self._wave
        wave.requests.append(request)
        self._send_if_full()
        try:
            await wave.full.wait()
        except asyncio.CancelledError:
            if request in wave.requests and wave.answer is None:
                wave.requests.remove(request)
            raise
        assert wave.answer is not None
        # One cancelled episode must not take the others' answers with it.
        results = await asyncio.shield(wave.answer)
        return results[request.request_id]

    async def generate_together(self, requests: list[GenerationRequest]) -> list[GenerationResult]:
        """Pass a batch that is already complete."""
        return await self._client.generate_together(requests)

    async def update_weights(self, state: Mapping[str, Tensor], version: int) -> None:
        """Pass new weights on."""
        await self._client.update_weights(state, version)

    async def close(self) -> None:
        """Close the client behind."""
        await self._client.close()

    def _send_if_full(self) -> None:
        wave = self._wave
        if wave.requests and len(wave.requests) >= self._running:
            self._wave = _Wave()
            wave.answer = asyncio.get_running_loop().create_task(self._answer(wave.requests))
            wave.full.set()

    async def _answer(self, requests: list[GenerationRequest]) -> dict[str, GenerationResult]:
        ordered = sorted(requests, key=lambda request: request.order)
        results = await self._client.generate_together(ordered)
        return {request.request_id: result for request, result in zip(ordered, results, strict=True)}
