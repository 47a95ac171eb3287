"""The models that a run trains and reads: in its own process, or divided over ranks.

Those that share devices with inference engines or with each other occupy the devices in turn.
"""

import asyncio
import shutil
import threading
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

import torch

from rollgym.extras import install_line_of
from rollgym.trainer.backends.base import Scorer, TrainBackend
from rollgym.trainer.backends.batching import Plans
from rollgym.trainer.backends.ranked import RankedBackend, Ranks
from rollgym.trainer.cluster.cluster import Cluster
from rollgym.trainer.cluster.placement import ACTOR_TRAIN, CRITIC, REFERENCE, Placement
from rollgym.trainer.cluster.roles import RANKS_FOLDER
from rollgym.trainer.config.run import RunSettings
from rollgym.trainer.core.console import RunConsole
from rollgym.trainer.core.device import torch_device
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.learn.learner import Models
from rollgym.trainer.run.backends import (
    ModelRole,
    RankRecipe,
    critic_backend,
    policy_backend,
    reference_model,
    warm_start_backend,
)
from rollgym.trainer.run.layout import check_combinations, maker_of
from rollgym.trainer.run.policy import Policy, build_policy
from rollgym.trainer.run.roles import RankGroups


class Movable(Protocol):
    """A model that can leave its devices."""

    def offload(self) -> None:
        """Move the model to the processor's memory."""
        ...

    def onload(self) -> None:
        """Move the model back to its devices."""
        ...


class TimeSharedModels:
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


def device_turns(settings: RunSettings, models: Models, shared: SharedDevices | None) -> TimeSharedModels:
    """Return the turns of a run's models with the inference engines, for models in ranks, if the settings ask for it.

    Args:
        settings: The run.
        models: Its models.
        shared: Moves models that share devices in turn, if any do.
    """
    if not settings.cluster.offload:
        return TimeSharedModels([])
    return TimeSharedModels(list(_movable(settings, models)) if shared is None else [shared])


def _movable(settings: RunSettings, models: Models) -> Iterator[Movable]:
    # A reference that is the policy without its adapters moves with the policy.
    reference: Scorer | None = None if settings.model.lora is not None else models.reference
    for model in (models.policy, models.critic, reference):
        if isinstance(model, RankedBackend):
            yield model


_START = "start"

_PLACED_AS: dict[ModelRole, str] = {
    "policy": ACTOR_TRAIN,
    "warm_start": ACTOR_TRAIN,
    "critic": CRITIC,
    "reference": REFERENCE,
}


class ModelSource(Protocol):
    """Makes the models of a run.

    Attributes:
        shared: Moves them to shared devices in turn; None if all of them fit there at once.
    """

    shared: SharedDevices | None

    def warm_start(self, learning_rate: float) -> TrainBackend:
        """Return the policy to be trained on demonstrations; its optimizer's state ends with that."""
        ...

    def end_warm_start(self, backend: TrainBackend) -> None:
        """Keep what was learnt: the models begin with it."""
        ...

    def models(self) -> Models:
        """Return what the run trains and reads."""
        ...

    def other(self, path: str) -> AbstractContextManager[Scorer]:
        """Open another policy for reading.

        Args:
            path: Its folder, or its name on the hub.
        """
        ...


class OwnModels:
    """Models in this process.

    Args:
        settings: The run.
        policy: The policy, whose weights are trained in place.
    """

    def __init__(self, settings: RunSettings, policy: Policy) -> None:
        self.shared: SharedDevices | None = None
        self._settings = settings
        self._policy = policy

    def warm_start(self, learning_rate: float) -> TrainBackend:
        """Return the policy to be trained on demonstrations."""
        self._warm = warm_start_backend(self._settings, self._policy.model, learning_rate)
        return self._warm

    def end_warm_start(self, backend: TrainBackend) -> None:
        """Keep what was learnt: it is in the policy's weights."""
        self._warm.release()

    def models(self) -> Models:
        """Return what the run trains and reads."""
        settings, model = self._settings, self._policy.model
        algorithm, plans = settings.algorithm, Plans()
        # The others first: the policy's own backend may round the weights that they start with.
        critic = critic_backend(settings, model, plans) if algorithm.critic is not None else None
        reference = reference_model(settings, model, plans) if algorithm.needs_reference else None
        return Models(policy_backend(settings, model, plans), critic, reference)

    @contextmanager
    def other(self, path: str) -> Iterator[Scorer]:
        """Open another policy for reading, and free its memory afterwards."""
        settings = _with_model(self._settings, path)
        yield reference_model(settings, build_policy(settings).model)


def _with_model(settings: RunSettings, path: str) -> RunSettings:
    """Return the settings of the same run with another model, without adapters."""
    plain = {
        name: type(settings.model).model_fields[name].default
        for name in ("hidden_size", "layers", "heads", "vision")
    }
    model = settings.model.model_copy(update={**plain, "path": path, "lora": None})
    return settings.model_copy(update={"model": model})


class RankedModels:
    """Models that are divided over ranks.

    Args:
        settings: The run.
        policy: The policy as this process has it: its shape, and its tokenizer.
        ranks: The ranks of each role of the placement, started, and their devices.
        folder: Holds a warm start's weights until the models have loaded them.
    """

    def __init__(
        self,
        settings: RunSettings,
        policy: Policy,
        ranks: Mapping[str, tuple[Ranks, Sequence[int]]],
        folder: Path,
    ) -> None:
        self.shared = SharedDevices() if settings.cluster.offload_models else None
        self._settings = settings
        self._policy = policy
        self._ranks = ranks
        self._folder = folder
        self._start: Path | None = None

    def warm_start(self, learning_rate: float) -> RankedBackend:
        """Return the policy to be trained on demonstrations."""
        return self._made("warm_start", RankRecipe(self._settings, "warm_start", None, learning_rate))

    def end_warm_start(self, backend: TrainBackend) -> None:
        """Keep the trained weights, bit by bit, in a place that the ranks can read."""
        assert isinstance(backend, RankedBackend)
        self._start = self._folder / _START
        if backend.has_adapter:
            backend.save_adapter(self._start)
        else:
            backend.save(self._start, exact=True)
        self._policy.processor.save_pretrained(self._start)
        backend.drop()

    def models(self) -> Models:
        """Return what the run trains and reads."""
        algorithm = self._settings.algorithm
        policy = self._policy_backend = self._made("policy", self._recipe("policy"))
        critic = self._made("critic", self._recipe("critic")) if algorithm.critic is not None else None
        reference: Scorer | None = None
        if algorithm.needs_reference:
            reference = self._made("reference", self._recipe("reference"))
        if self._start is not None:
            shutil.rmtree(self._start)
        return Models(policy, critic, reference)

    @contextmanager
    def other(self, path: str) -> Iterator[Scorer]:
        """Open another policy for reading; the ranks drop it afterwards."""
        recipe = RankRecipe(_with_model(self._settings, path), "reference")
        width = self._policy.model.config.get_text_config().hidden_size
        ranks, devices = self._ranks[ACTOR_TRAIN]
        if self.shared is not None:
            self.shared.make_room(devices)
        backend = RankedBackend(ranks, "reference", recipe, width)
        yield backend
        backend.drop()

    def _recipe(self, role: ModelRole) -> RankRecipe:
        return RankRecipe(self._settings, role, self._start)

    def _made(self, role: ModelRole, recipe: RankRecipe) -> RankedBackend:
        # A reference that is the policy without its adapters shares the policy's device, and is offloaded with it.
        beside = role in ("reference", "warm_start") and self._settings.model.lora is not None
        ranks, devices = self._ranks[_PLACED_AS["policy" if beside else role]]
        width = self._policy.model.config.get_text_config().hidden_size
        in_pieces = self._settings.backend.sharded_checkpoints
        if (shared := self.shared) is None or role == "warm_start":
            return RankedBackend(ranks, role, recipe, width, in_pieces=in_pieces)
        if beside:
            shared.bring(self._policy_backend)
            use = lambda _: shared.bring(self._policy_backend)  # noqa: E731
            return RankedBackend(ranks, role, recipe, width, in_pieces=in_pieces, before_use=use)
        shared.make_room(devices)
        backend = RankedBackend(ranks, role, recipe, width, in_pieces=in_pieces, before_use=shared.bring)
        shared.add(backend, devices)
        return backend


@asynccontextmanager
async def open_models(
    settings: RunSettings,
    policy: Policy,
    directory: Path,
    console: RunConsole,
    cluster: Cluster,
    groups: RankGroups | None = None,
) -> AsyncIterator[ModelSource]:
    """Open the factory of a run's models: in this process, or in ranks.

    Args:
        settings: The run.
        policy: The policy as this process has it.
        directory: The run's.
        console: Shows ranks that were started.
        cluster: Places the roles.
        groups: Ranks that outlive the context; without them, they are started here and end with it.

    Raises:
        ConfigError: If there are fewer devices than ranks.
        RunError: If a rank does not start.
    """
    if settings.backend.in_process:
        yield OwnModels(settings, policy)
        return
    # A model that had to be fetched could not be looked at before.
    maker_of(settings.backend).check_division(settings.backend, policy.model.config)
    _check_devices(settings, cluster.placement)
    placed = [cluster.placement.role(name) for name in (ACTOR_TRAIN, CRITIC, REFERENCE)]
    async with AsyncExitStack() as stack:
        if groups is None:
            groups = RankGroups(settings, cluster)
            stack.push_async_callback(groups.close)
        ranks = {role.name: (await groups.group(role), role.devices) for role in placed if role is not None}
        console.say(f"training on {settings.backend.ranks} ranks ({settings.backend.kind})")
        yield RankedModels(settings, policy, ranks, directory / RANKS_FOLDER)


def _check_devices(settings: RunSettings, placement: Placement) -> None:
    """Refuse devices that this machine does not have; those of a cluster are its own to count.

    Raises:
        ConfigError: If there are fewer devices than ranks.
    """
    if placement.kind != "local":
        return
    backend = settings.backend
    device = torch_device(settings.model.device)
    if ":" in settings.model.device:
        raise ConfigError(
            f"model.device {settings.model.device} names one device, and backend.ranks {backend.ranks} take one each: "
            f"set model.device={device.type}"
        )
    highest = max(max(role.devices) for role in placement.roles if role.does == "rank")
    if device.type != "cpu" and (there := torch.accelerator.device_count()) <= highest:
        raise ConfigError(
            f"backend.ranks {backend.ranks}: there are {there} devices of type {device.type} here: lower "
            "backend.ranks, or set model.device=cpu"
        )


def check_trainable(settings: RunSettings) -> None:
    """Refuse what no run can train with, before anything is begun.

    Raises:
        ConfigError: If there is such a setting; the message says what to take in its place.
    """
    kind = settings.backend.what
    if kind.package and find_spec(kind.package) is None:
        raise ConfigError(
            f"backend.kind {kind.name} needs the package {kind.package}, which is not installed: "
            f"{install_line_of(kind.package)}"
        )
    check_combinations(settings)
    if not kind.on_gpus_only:
        return
    if settings.cluster.kind == "local" and torch_device(settings.model.device).type == "cpu":
        raise ConfigError(
            f"backend.kind {kind.name} computes on CUDA devices only, and there is none here, or model.device is cpu: "
            "take backend.kind fsdp2, which divides layers too (backend.mesh.tensor)"
        )
