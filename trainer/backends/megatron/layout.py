"""Who computes what of a model that Megatron divides: pure arithmetic, as Megatron's own groups have it."""

from collections.abc import Iterator
from dataclasses import dataclass

from transformers import PretrainedConfig

from trainer.backends.rank_group import MeshShape
from trainer.core.errors import ConfigError

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""What models are called (`model_type` of their config.json) whose layers are built here."""

_ROTATIONS = ("default", "linear", "llama3")
"""Kinds of rotary embeddings that are a table of frequencies, and nothing else."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank is in each dimension of the mesh; each counted from 0."""

    tensor: int
    context: int
    data: int
    stage: int
    expert: int

    @classmethod
    def of(cls, mesh: MeshShape, rank: int) -> "Place":
        """Return the place of a rank."""
        return cls(
            tensor=rank % mesh.tensor,
            context=rank // mesh.tensor % mesh.context,
            data=mesh.data_rank(rank),
            stage=mesh.stage(rank),
            expert=rank // mesh.tensor % mesh.expert,
        )


def groups(mesh: MeshShape, dimension: str) -> list[list[int]]:
    """Return the ranks that differ in one dimension only, group by group.

    Args:
        mesh: How ranks share the work.
        dimension: "tensor", "context", "data", "stage" or "expert". The ranks of "data" hold the same dense weights and
            compute other rows; those of "expert" hold the experts of a layer together.
    """
    apart: dict[tuple[int, ...], list[int]] = {}
    for rank in range(mesh.size):
        apart.setdefault(_others(mesh, rank, dimension), []).append(rank)
    return list(apart.values())


def _others(mesh: MeshShape, rank: int, dimension: str) -> tuple[int, ...]:
    place = Place.of(mesh, rank)
    if dimension == "expert":
        # Neighbours in the experts: counted over the ranks of context and data together.
        return (place.stage, place.tensor, rank // (mesh.tensor * mesh.expert))
    names = [name for name in ("stage", "data", "context", "tensor") if name != dimension]
    return tuple(getattr(place, name) for name in names)


def layers_of(layers: int, mesh: MeshShape, stage: int) -> range:
    """Return the layers of a stage."""
    each = layers // mesh.pipeline
    return range(stage * each, (stage + 1) * each)


def experts_of(experts: int, mesh: MeshShape, place: Place) -> range:
    """Return the experts of each layer that a rank holds."""
    each = experts // mesh.expert
    return range(place.expert * each, (place.expert + 1) * each)


def length_multiple(mesh: MeshShape) -> int:
    """Return what the lengths of rows are filled up to multiples of.

    Each part of a row is two pieces, one of its front and one of its end, and activations between layers are divided
    over the ranks of a layer.
    """
    return mesh.tensor * (2 * mesh.context if mesh.context > 1 else 1)


def pieces_of_row(tokens: int, mesh: MeshShape, context: int) -> Iterator[range]:
    """Yield the two pieces of a row that a rank of `context` computes, or the whole row.

    The first ranks compute the first and the last pieces, so that all attend to as many tokens.

    Args:
        tokens: Length of the row, filled up.
        mesh: How ranks share the work.
        context: Which of the row's parts.
    """
    if mesh.context == 1:
        yield range(tokens)
        return
    each = tokens // (2 * mesh.context)
    for piece in (context, 2 * mesh.context - 1 - context):
        yield range(piece * each, (piece + 1) * each)


def check_layout(config: PretrainedConfig, mesh: MeshShape, *, sequence_parallel: bool = True) -> None:
    """Refuse what cannot be divided, before anything is started.

    Args:
        config: The model's.
        mesh: How ranks share the work.
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
    for name, count in counts.items():
        _check_divides("tensor", mesh.tensor, name, count)
    _check_divides("pipeline", mesh.pipeline, "num_hidden_layers", config.num_hidden_layers)
    if mesh.expert > 1 and not experts:
        raise ConfigError(
            f"backend.mesh.expert {mesh.expert}: a model of type {config.model_type} has no experts: leave it out"
        )
    if experts:
        _check_divides("expert", mesh.expert, "the number of experts", experts)
        if mesh.tensor > 1 and not sequence_parallel:
            raise ConfigError(
                f"backend.sequence_parallel false: experts and mesh.tensor {mesh.tensor} together need it: leave it out"
            )
    if mesh.data % mesh.expert:
        raise ConfigError(
            f"backend.mesh.expert {mesh.expert} does not divide the {mesh.data} ranks of mesh.data: take a number "
            "that does"
        )


def expert_count(config: PretrainedConfig) -> int:
    """Return the number of experts of each layer; 0 of a dense model."""
    return int(getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 0)


def _check_divides(dimension: str, parts: int, name: str, count: int) -> None:
    if count % parts:
        fitting = [number for number in range(1, parts) if count % number == 0]
        raise ConfigError(
            f"backend.mesh.{dimension} {parts} does not divide {name} ({count}): take {fitting[-1]}, or another number "
            "that does"
        )


def _check_family(config: PretrainedConfig) -> None:
    kind = config.model_type
    remedy = "take backend.kind=fsdp2 or deepspeed"
    if kind not in FAMILIES:
        raise ConfigError(
            f"backend.kind megatron: models of type {kind} are not built here (only {', '.join(FAMILIES)}): {remedy}"
        )
    rotation = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    odd = {
        f"rotary embeddings of type {rotation}": rotation not in _ROTATIONS,
        "sliding windows": "sliding_attention" in (getattr(config, "layer_types", None) or []),
        "biases of attention": kind != "qwen2" and getattr(config, "attention_bias", False),
        "biases of the layers between": getattr(config, "mlp_bias", False),
        f"the activation {config.hidden_act}": config.hidden_act != "silu",
        "layers without experts between those with": bool(getattr(config, "mlp_only_layers", None))
        or (getattr(config, "decoder_sparse_step", 1) or 1) != 1,
    }
    for what, there in odd.items():
        if there:
            raise ConfigError(
                f"backend.kind megatron: {what} of this {kind} model are not built here: {remedy}"
            )
