"""What an inference client in front of another one passes on as it comes."""

from collections.abc import Sequence

from trainer.inference.base import (
    GenerationRequest,
    GenerationResult,
    InferenceClient,
    InferenceCounters,
    InferenceHealth,
    PauseMode,
    WeightSource,
)


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
        """Pass it on."""
        await self._client.pause(mode)

    async def resume(self) -> None:
        """Pass it on."""
        await self._client.resume()

    async def sync(self, source: WeightSource, version: int) -> None:
        """Pass new weights on."""
        await self._client.sync(source, version)

    async def health(self) -> InferenceHealth:
        """How the client behind is."""
        return await self._client.health()

    @property
    def counters(self) -> InferenceCounters:
        """What the client behind has done."""
        return self._client.counters

    async def close(self) -> None:
        """Close the client behind."""
        await self._client.close()
