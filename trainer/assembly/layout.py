"""Checks, before anything is built, whether a run's model can be sharded and trained as its settings say."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from rollgym.trainer.assembly.memory import model_config
from rollgym.trainer.config.run import RunSettings
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.models.division import check_layout, check_routed, check_server, check_tensor


def check_combinations(settings: RunSettings) -> None:
    """Refuse settings that a kind of backend does not train with, for any model.

    Raises:
        ConfigError: If there is such a setting; the message says what to take in its place.
    """
    kind = settings.backend.kind
    if kind in ("deepspeed", "megatron") and settings.model.compile not in (None, "auto"):
        raise ConfigError(
            f"model.compile: what backend.kind {kind} hooks into a model is not compiled with: leave it out, or take "
            "kind torch or fsdp2"
        )
    if kind != "torch" and settings.model.kernels == "liger":
        raise ConfigError(
            f"model.kernels liger: backend.kind {kind} takes models apart, which Liger's classes are not tried with: "
            "leave it out; model.compile fuses as much"
        )
    beside = settings.distill is not None and settings.distill.estimate != "sampled"
    if kind in ("deepspeed", "megatron") and beside:
        raise ConfigError(
            f"backend.kind {kind} computes no teachers beside the student: take kind torch or fsdp2, or "
            "distill.estimate=sampled"
        )
    if kind == "megatron" and settings.reward is not None:
        raise ConfigError(
            "reward: backend.kind megatron trains no reward models: take kind torch, fsdp2 or deepspeed"
        )
    if kind == "fsdp2" and settings.backend.mesh.tensor > 1 and settings.model.lora is not None:
        raise ConfigError(
            f"backend.mesh.tensor {settings.backend.mesh.tensor}: adapters (model.lora) are not divided by tensor "
            "parallelism here: set backend.mesh.tensor=1, or train all weights"
        )
    if kind != "megatron":
        return
    if settings.optimizer.fused is True:
        raise ConfigError(
            "optimizer.fused: Megatron-Core takes its steps by the kernels that it finds (TransformerEngine's, Apex's "
            "or torch's): leave it out"
        )
    if settings.optimizer.packed_rows == "on":
        raise ConfigError(
            "optimizer.packed_rows on: Megatron's attention is given rows of equal length here: leave it out"
        )
    if settings.model.lora is not None:
        raise ConfigError(
            "model.lora: adapters are not trained by backend.kind megatron: take backend.kind fsdp2 or deepspeed, or "
            "leave model.lora out"
        )


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
    backend, mesh = settings.backend, settings.backend.mesh
    if backend.kind == "megatron":
        shape = SimpleNamespace(
            data=backend.data, tensor=mesh.tensor, pipeline=mesh.pipeline, expert=mesh.expert
        )
        check_layout(model, shape, sequence_parallel=backend.sequence_parallel)
    if backend.kind == "fsdp2":
        check_tensor(model, mesh.tensor)
    launch = settings.inference.launch
    if launch is not None and settings.plays:
        check_server(model, launch.tensor_parallel)
    if settings.optimizer.router_replay:
        check_routed(model, "optimizer.router_replay")
    if settings.inference.routed_experts:
        check_routed(model, "inference.routed_experts")
