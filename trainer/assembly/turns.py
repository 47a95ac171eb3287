"""Models whose devices are shared with whoever samples: they are there by turns."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Protocol

from trainer.backends.base import Scorer
from trainer.backends.ranked import RankedBackend
from trainer.config.run import RunSettings
from trainer.learn.learner import Models


class Movable(Protocol):
    """A model that can leave its devices."""

    def offload(self) -> None:
        """Bring it to the processor's memory."""
        ...

    def onload(self) -> None:
        """Bring it back."""
        ...


class DeviceTurns:
    """Keeps models in the processor's memory but for the times when they are used.

    Args:
        models: The models; none where nothing is shared.
    """

    def __init__(self, models: list[Movable]) -> None:
        self._models = models

    async def leave(self) -> None:
        """Have all of them leave their devices."""
        for model in self._models:
            await asyncio.to_thread(model.offload)

    @asynccontextmanager
    async def resident(self) -> AsyncIterator[None]:
        """Have all of them on their devices while inside. What goes wrong inside leaves them there."""
        for model in self._models:
            await asyncio.to_thread(model.onload)
        yield
        await self.leave()


def device_turns(settings: RunSettings, models: Models) -> DeviceTurns:
    """Return the turns of a run's models: of those that are ranks, where the settings ask for it."""
    return DeviceTurns(list(_movable(settings, models)) if settings.cluster.offload else [])


def _movable(settings: RunSettings, models: Models) -> Iterator[Movable]:
    # A reference that is the policy without its adapters goes where the policy goes.
    reference: Scorer | None = None if settings.model.lora is not None else models.reference
    for model in (models.policy, models.critic, reference):
        if isinstance(model, RankedBackend):
            yield model
