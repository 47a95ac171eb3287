"""Checks, before anything is built, whether a run's model can be sharded and trained as its settings say.

What makes a rank's part of a model is here by kind of back-end.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol, cast

from rollgym.trainer.config.backend import BackendSettings
from rollgym.trainer.config.run import RunSettings
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.core.plugins import load_attribute
from rollgym.trainer.models.division import check_layout, check_routed, check_server, check_tensor
from rollgym.trainer.run.memory import model_config

if TYPE_CHECKING:
    from rollgym.trainer.backends.heads import Head
    from rollgym.trainer.backends.optimizer import Schedule
    from rollgym.trainer.backends.rank_group import RankGroup


class RankMaker(Protocol):
    """Makes a rank's part of a model. Torch is imported inside of its functions, for divisions are checked without it.

    A head is that of the whole model on the first rank, and None on the others, which get their pieces of it.
    """

    def check_division(self, backend: BackendSettings, model: Any) -> None:
        """Refuse a mesh that a model, given by its configuration, does not divide by."""
        ...

    def read_only(self, settings: RunSettings, head: "Head | None", group: "RankGroup") -> Any:
        """Make a model that is not trained, such as a reference."""
        ...

    def trained(
        self, settings: RunSettings, head: "Head | None", group: "RankGroup", schedule: "Schedule"
    ) -> Any:
        """Make a model and its optimizer: a `ShardedBackend`."""
        ...


def maker_of(backend: BackendSettings) -> RankMaker:
    """Return what makes the parts of a kind of back-end."""
    return cast(RankMaker, load_attribute(backend.what.maker))


@dataclass(frozen=True, slots=True)
class Fsdp2Maker:
    """By torch's own sharding."""

    def check_division(self, backend: BackendSettings, model: Any) -> None:
        """Refuse a mesh that does not divide the heads of a layer."""
        check_tensor(model, backend.mesh.tensor)

    def read_only(self, settings: RunSettings, head: "Head | None", group: "RankGroup") -> Any:
        """Make a model that is not trained."""
        from rollgym.trainer.backends.fsdp2 import fsdp2_model
        from rollgym.trainer.core.device import DTYPES

        return fsdp2_model(
            head,
            group,
            dtype=DTYPES[settings.model.dtype],
            tokens_per_micro_batch=settings.optimizer.micro_batch_tokens,
            cpu_offload=settings.backend.cpu_offload,
            shared_prefixes=settings.optimizer.shared_prefixes,
            packed_rows=settings.optimizer.packed_rows,
        )

    def trained(
        self, settings: RunSettings, head: "Head | None", group: "RankGroup", schedule: "Schedule"
    ) -> Any:
        """Make a model and its optimizer."""
        from rollgym.trainer.backends.fsdp2 import fsdp2_backend
        from rollgym.trainer.core.device import DTYPES

        return fsdp2_backend(
            head,
            group,
            settings.optimizer,
            schedule,
            dtype=DTYPES[settings.model.dtype],
            gradient_checkpointing=settings.model.gradient_checkpointing,
            compiled=settings.model.compile,
            cpu_offload=settings.backend.cpu_offload,
        )


@dataclass(frozen=True, slots=True)
class DeepspeedMaker(Fsdp2Maker):
    """By ZeRO; what is not trained is divided as FSDP2 does it."""

    def check_division(self, backend: BackendSettings, model: Any) -> None:
        """Accept all: layers stay whole."""

    def trained(
        self, settings: RunSettings, head: "Head | None", group: "RankGroup", schedule: "Schedule"
    ) -> Any:
        """Make a model and its optimizer."""
        from rollgym.trainer.backends.zero import zero_backend
        from rollgym.trainer.core.device import DTYPES

        return zero_backend(
            head,
            group,
            settings.optimizer,
            schedule,
            stage=settings.backend.zero_stage,
            dtype=DTYPES[settings.model.dtype],
            gradient_checkpointing=settings.model.gradient_checkpointing,
            cpu_offload=settings.backend.cpu_offload,
        )


@dataclass(frozen=True, slots=True)
class MegatronMaker:
    """By Megatron-Core."""

    def check_division(self, backend: BackendSettings, model: Any) -> None:
        """Refuse a mesh that does not divide the model's layers, heads and experts."""
        mesh = backend.mesh
        shape = SimpleNamespace(
            data=backend.data, tensor=mesh.tensor, pipeline=mesh.pipeline, expert=mesh.expert
        )
        check_layout(model, shape, sequence_parallel=backend.sequence_parallel)

    def read_only(self, settings: RunSettings, head: "Head | None", group: "RankGroup") -> Any:
        """Make a model that is not trained."""
        from rollgym.trainer.backends.megatron.backend import megatron_model
        from rollgym.trainer.core.device import DTYPES

        return megatron_model(
            head,
            group,
            dtype=DTYPES[settings.model.dtype],
            tokens_per_micro_batch=settings.optimizer.micro_batch_tokens,
            sequence_parallel=settings.backend.sequence_parallel,
        )

    def trained(
        self, settings: RunSettings, head: "Head | None", group: "RankGroup", schedule: "Schedule"
    ) -> Any:
        """Make a model and its optimizer."""
        from rollgym.trainer.backends.megatron.backend import megatron_backend
        from rollgym.trainer.core.device import DTYPES

        return megatron_backend(
            head,
            group,
            settings.optimizer,
            schedule,
            dtype=DTYPES[settings.model.dtype],
            gradient_checkpointing=settings.model.gradient_checkpointing,
            sequence_parallel=settings.backend.sequence_parallel,
        )


FSDP2, DEEPSPEED, MEGATRON = Fsdp2Maker(), DeepspeedMaker(), MegatronMaker()
"""Named by the kinds that they make the ranks of."""


def check_combinations(settings: RunSettings) -> None:
    """Refuse settings that a kind of backend does not train with, for any model.

    Raises:
        ConfigError: If there is such a setting; the message says what to take in its place.
    """
    for reason in settings.backend.what.refusals(settings):
        raise ConfigError(reason)


def check_model(settings: RunSettings) -> None:
    """Refuse what the run's model cannot be trained with, as far as its sizes are known here before it is loaded.

    Raises:
        ConfigError: If there is such a setting; the message says what to take in its place.
    """
    check_combinations(settings)
    try:
        config = model_config(settings.model)
    except ConfigError:
        return  # the memory plan reports it, and loading the model checks again
    check_division(settings, config)


def check_division(settings: RunSettings, config: Mapping[str, Any]) -> None:
    """Refuse a mesh, or servers, that the run's model does not divide by.

    Args:
        settings: The run.
        config: The model's config.json.

    Raises:
        ConfigError: If there is a number that does not divide; the message has one that does.
    """
    try:
        _check_division(settings, SimpleNamespace(**(config.get("text_config") or config)))
    except AttributeError as error:
        raise ConfigError(f"the model's config.json lacks a size: {error.name}") from error


def _check_division(settings: RunSettings, model: SimpleNamespace) -> None:
    if settings.backend.what.maker:
        maker_of(settings.backend).check_division(settings.backend, model)
    launch = settings.inference.launch
    if launch is not None and settings.plays:
        check_server(model, launch.tensor_parallel)
    if settings.optimizer.router_replay:
        check_routed(model, "optimizer.router_replay")
    if settings.inference.routed_experts:
        check_routed(model, "inference.routed_experts")
