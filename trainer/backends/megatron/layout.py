"""The parts of a model that each of Megatron's ranks computes: pure arithmetic, equal to Megatron's own groups."""

from collections.abc import Iterator
from dataclasses import dataclass

from rollgym.trainer.backends.rank_group import MeshShape


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


def layers_of_stage(layers: int, mesh: MeshShape, stage: int) -> range:
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
