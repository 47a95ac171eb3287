"""Models that share devices with inference engines or with each other: they occupy the devices in turn."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from typing import Protocol

from rollgym.trainer.backends.base import Scorer
from rollgym.trainer.backends.ranked import RankedBackend
from rollgym.trainer.config.run import RunSettings
from rollgym.trainer.learn.learner import Models


class Movable(Protocol):
    """A model that can leave its devices."""

    def offload(self) -> None:
        """Move the model to the processor's memory."""
        ...

    def onload(self) -> None:
        """Move the model back to its devices."""
        ...


class DeviceTurns:
    """Keeps models in the processor's memory but for the times when they are used.

    Args:
        models: The models; empty if no devices are shared.
    """

    def __init__(self, models: list[Movable]) -> None:
        self._models = models

    async def leave(self) -> None:
        """Move all of them off their devices."""
        for model in self._models:
            await asyncio.to_thread(model.offload)

    @asynccontextmanager
    async def resident(self) -> AsyncIterator[None]:
        """Keep all of them on their devices while the context is open, and after an error inside."""
        for model in self._models:
            await asyncio.to_thread(model.onload)
        yield
        await self.leave()


class SharedDevices:
    """Has models whose ranks share devices be there by turns: one that is used has the others leave.

    All models are on their devices when they are added. Calls to them come from one thread at a time, or wait.
    """

    def __init__(self) -> None:
        self._devices: dict[Movable, frozenset[int]] = {}
        self._away: set[Movable] = set()
        self._moving = threading.RLock()

    def make_room(self, devices: Iterable[int]) -> None:
        """Move all models off these devices."""
        wanted = frozenset(devices)
        with self._moving:
            for model, placed in self._devices.items():
                if placed & wanted and model not in self._away:
                    model.offload()
                    self._away.add(model)

    def add(self, model: Movable, devices: Iterable[int]) -> None:
        """Register a model that was just built on its devices."""
        self._devices[model] = frozenset(devices)

    def bring(self, model: Movable) -> None:
        """Move a model to its devices, and all others off them."""
        with self._moving:
            if model not in self._devices:
                return  # it is being built, in the room that was made for it
            others = [each for each in self._devices if each is not model and each not in self._away]
            for other in others:
                if self._devices[other] & self._devices[model]:
                    other.offload()
                    self._away.add(other)
            if model in self._away:
                model.onload()
                self._away.discard(model)

    def offload(self) -> None:
        """Move all models off their devices."""
        self.make_room({device for placed in self._devices.values() for device in placed})

    def onload(self) -> None:
        """Do nothing: each model returns when it is used."""


def device_turns(settings: RunSettings, models: Models, shared: SharedDevices | None) -> DeviceTurns:
    """Return the turns of a run's models with the inference engines, for models in ranks, if the settings ask for it.

    Args:
        settings: The run.
        models: Its models.
        shared: Moves models that share devices in turn, if any do.
    """
    if not settings.cluster.offload:
        return DeviceTurns([])
    return DeviceTurns(list(_movable(settings, models)) if shared is None else [shared])


def _movable(settings: RunSettings, models: Models) -> Iterator[Movable]:
    # A reference that is the policy without its adapters moves with the policy.
    reference: Scorer | None = None if settings.model.lora is not None else models.reference
    for model in (models.policy, models.critic, reference):
        if isinstance(model, RankedBackend):
            yield model
