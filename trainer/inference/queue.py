"""An inference client in front of another one: so many replies are sampled at once, those of the oldest step first.

Who waits is served by the step that will train it, and not by arrival alone: a step waits for its own groups, and what
those of later steps need can be sampled meanwhile. The engine is as busy either way, and the last episode of a step
ends sooner. Within a step all groups are waited for, so there the order is that of arrival: going by age, the youngest
group's longest episode would begin last.
"""

from trainer.inference.base import (
    GenerationRequest,
    GenerationResult,
    InferenceClient,
)
from trainer.inference.forwarding import ForwardingClient
from trainer.inference.places import OrderedPlaces


class GenerationQueue(ForwardingClient):
    """Holds back what the client behind would let wait in the order of arrival.

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
