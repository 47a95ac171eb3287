"""Inference clients in front of another one: a base that forwards everything, and one that delays requests."""

from collections.abc import Sequence

from rollgym.trainer.inference.base import (
    GenerationRequest,
    GenerationResult,
    InferenceClient,
    InferenceCounters,
    InferenceHealth,
    PauseMode,
    WeightSource,
)
from rollgym.trainer.inference.places import OrderedPlaces


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
        self._places = OrderedPlaces(limit)

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Wait for a place, and return the reply."""
        async with self._places.held(request.priority):
            return await self._client.generate(request)
