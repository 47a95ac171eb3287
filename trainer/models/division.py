"""Which numbers of a model its ranks must divide. Pure: configurations in, an error with its remedy out; no torch."""

from collections.abc import Mapping
from typing import Any, Protocol

from rollgym.trainer.core.errors import ConfigError

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""Families (`model_type` of config.json) whose layers are built here."""

_ROTATIONS = ("default", "linear", "llama3")
"""Kinds of rotary embeddings that are a table of frequencies, and nothing else."""

ROUTED = ("qwen2_moe", "qwen3_moe")
"""Families whose routers accept a given choice of experts."""


class Mesh(Protocol):
    """How ranks share the work; see `rollgym.trainer.backends.rank_group.MeshShape`."""

    @property
    def data(self) -> int:
        """Number of ranks that share the batch (data parallel)."""
        ...

    @property
    def tensor(self) -> int:
        """Parts of each layer's weights."""
        ...

    @property
    def pipeline(self) -> int:
        """Number of pipeline stages that the layers are split into."""
        ...

    @property
    def expert(self) -> int:
        """Parts of the experts of a layer."""
        ...


def check_layout(config: Any, mesh: Mesh, *, sequence_parallel: bool = True) -> None:
    """Refuse what Megatron cannot divide, before anything is started.

    Args:
        config: The model's configuration.
        mesh: The division of work among ranks.
        sequence_parallel: Whether activations between layers are divided over the ranks of a layer.

    Raises:
        ConfigError: If there is such a thing; the message names the setting and what to take in its place.
    """
    _check_family(config)
    counts = {name: getattr(config, name, 0) or 0 for name in ("num_attention_heads", "num_key_value_heads")}
    experts = expert_count(config)
    counts["moe_intermediate_size" if experts else "intermediate_size"] = (
        config.moe_intermediate_size if experts else config.intermediate_size
    )
    _check_divides("tensor", mesh.tensor, counts)
    _check_divides("pipeline", mesh.pipeline, {"num_hidden_layers": config.num_hidden_layers})
    if mesh.expert > 1 and not experts:
        raise ConfigError(
            f"backend.mesh.expert {mesh.expert}: a model of type {config.model_type} has no experts: leave it out"
        )
    if experts:
        _check_divides("expert", mesh.expert, {"the number of experts": experts})
        if mesh.tensor > 1 and not sequence_parallel:
            raise ConfigError(
                f"backend.sequence_parallel false: experts and mesh.tensor {mesh.tensor} together need it: leave it out"
            )
    if mesh.data % mesh.expert:
        raise ConfigError(
            f"backend.mesh.expert {mesh.expert} does not divide the {mesh.data} ranks of mesh.data: take a number "
            "that does"
        )


def expert_count(config: Any) -> int:
    """Return the number of experts of each layer; 0 of a dense model."""
    return int(getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 0)


def _check_divides(dimension: str, parts: int, counts: Mapping[str, int]) -> None:
    for name, count in counts.items():
        if count % parts:
            raise ConfigError(
                f"backend.mesh.{dimension} {parts} does not divide {name} ({count}): take "
                f"{_fitting(parts, *counts.values())}, or another number that does"
            )


def _fitting(parts: int, *counts: int) -> int:
    """Return the largest number below `parts` that divides all counts."""
    return next(number for number in range(parts - 1, 0, -1) if not any(count % number for count in counts))


def _check_family(config: Any) -> None:
    kind = config.model_type
    remedy = "take backend.kind=fsdp2 or deepspeed"
    if kind not in FAMILIES:
        raise ConfigError(
            f"backend.kind megatron: models of type {kind} are not built here (only {', '.join(FAMILIES)}): {remedy}"
        )
    rotation = _rotation(config)
    activation = getattr(config, "hidden_act", "silu")
    odd = {
        f"rotary embeddings of type {rotation}": rotation not in _ROTATIONS,
        "sliding windows": "sliding_attention" in (getattr(config, "layer_types", None) or []),
        "biases of attention": kind != "qwen2" and getattr(config, "attention_bias", False),
        "biases of the layers between": getattr(config, "mlp_bias", False),
        f"the activation {activation}": activation != "silu",
        "layers without experts between those with": bool(getattr(config, "mlp_only_layers", None))
        or (getattr(config, "decoder_sparse_step", 1) or 1) != 1,
    }
    for what, there in odd.items():
        if there:
            raise ConfigError(
                f"backend.kind megatron: {what} of this {kind} model are not built here: {remedy}"
            )


def _rotation(config: Any) -> str:
    """Return the kind of a model's rotary embeddings, which older files call `rope_scaling`."""
    said = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    return str(said.get("rope_type") or said.get("type") or "default")


def check_tensor(config: Any, parts: int) -> None:
    """Refuse a model whose layers torch's tensor parallelism does not divide, as far as its numbers say.

    Args:
        config: The model's configuration.
        parts: Tensor-parallel ranks.

    Raises:
        ConfigError: If there is such a number; the message has one that divides.
    """
    if parts == 1:
        return
    if experts := expert_count(config):
        raise ConfigError(
            f"backend.mesh.tensor {parts}: layers of {experts} experts are not divided by fsdp2: set "
            "backend.mesh.tensor=1, or take backend.kind=megatron"
        )
    names = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    _check_divides("tensor", parts, {name: getattr(config, name, 0) or 0 for name in names})


def check_server(config: Any, parts: int) -> None:
    """Refuse inference servers that cannot divide a model over their devices.

    Args:
        config: The model's configuration.
        parts: Devices of a server.

    Raises:
        ConfigError: If its heads do not divide.
    """
    heads = getattr(config, "num_attention_heads", 0) or 0
    shared = getattr(config, "num_key_value_heads", None) or heads
    if heads % parts:
        raise ConfigError(
            f"inference.launch.tensor_parallel {parts} does not divide the model's {heads} attention heads: take "
            f"{_fitting(parts, heads)}, or another number that does"
        )
    if shared % parts and parts % shared:
        raise ConfigError(
            f"inference.launch.tensor_parallel {parts} neither divides the model's {shared} heads of keys and values "
            f"nor is a multiple of them: take {_fitting(parts, shared)}, or another number that does"
        )


def check_routed(config: Any, setting: str) -> None:
    """Refuse to replay experts in a model that has none, or whose routers do not accept a given choice.

    Args:
        config: The model's configuration.
        setting: The setting that asks for it.

    Raises:
        ConfigError: If the model is such a model.
    """
    if config.model_type not in ROUTED:
        what = "whose routers cannot be told" if expert_count(config) else "which has no experts"
        raise ConfigError(
            f"{setting}: the model is of type {config.model_type}, {what} (mixtures that can: {', '.join(ROUTED)}): "
            "leave it out"
        )
