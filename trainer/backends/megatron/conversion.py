"""Which part of which of a model's weights lies where in Megatron's modules: names and places, as pure functions.

Megatron holds the queries, keys and values of a layer in one matrix, group by group, and the two halves of a gated
layer in another; each rank holds its heads', its columns' or its experts' part. What corresponds is given as pairs of
views of equal shape, so that loading is copying one way, and exporting the other.

The distributed optimizer gives each of the ranks with the same weights a stretch of each, wherever in a row it begins
and ends. A checkpoint that ranks write in pieces knows boxes of whole weights, by offsets and sizes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal

import torch
from torch import Tensor
from transformers import PretrainedConfig

from rollgym.trainer.backends.megatron.layout import Place, experts_of, layers_of_stage
from rollgym.trainer.backends.rank_group import MeshShape
from rollgym.trainer.models.division import expert_count
from rollgym.trainer.records.pieces import ArrayBox, boxes_of_stretch

Kind = Literal["whole", "columns", "vocabulary", "qkv", "gate_up"]
"""How a weight is divided over the ranks of a layer.

Not at all; by columns; by rows, of which the last rank may have fewer than its tensor; by groups of heads; or by the
rows of two halves.
"""


@dataclass(frozen=True, slots=True)
class Shape:
    """What of a model decides its weights' names and places.

    Attributes:
        layers: Number of layers.
        heads: Attention heads.
        groups: Heads of keys and values.
        experts: Experts of each layer; 0 of a dense model.
        biased: Whether queries, keys and values have biases.
        normed: Whether queries and keys are normalised.
        tied: Whether the output embedding is the input embedding.
        critic: Whether there is one number per token in place of the vocabulary.
    """

    layers: int
    heads: int
    groups: int
    experts: int
    biased: bool
    normed: bool
    tied: bool
    critic: bool

    @classmethod
    def of(cls, config: PretrainedConfig, *, critic: bool = False) -> "Shape":
        """Return the shape of a model by its configuration."""
        return cls(
            layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            groups=config.num_key_value_heads,
            experts=expert_count(config),
            biased=config.model_type == "qwen2",
            normed=config.model_type in ("qwen3", "qwen3_moe"),
            tied=bool(config.tie_word_embeddings),
            critic=critic,
        )


@dataclass(frozen=True, slots=True)
class Weight:
    """One of Megatron's weights, and what it is made of.

    Attributes:
        name: Its name in the module of the rank that holds it.
        sources: Names of the model's own modules' weights that it is made of, in order.
        kind: How it is divided.
        expert: Which expert's it is, where all of a layer's are one weight of the model.
        copied: Whether another rank of the same part of the batch holds it too, whose is the one that is exported.
    """

    name: str
    sources: tuple[str, ...]
    kind: Kind
    expert: int | None = None
    copied: bool = False


def weights_of(shape: Shape, mesh: MeshShape, place: Place) -> Iterator[Weight]:
    """Yield the weights that a rank holds.

    Args:
        shape: The model.
        mesh: How ranks share the work.
        place: Where the rank is.
    """
    body = "body." if shape.critic else "model."
    last = place.stage == mesh.pipeline - 1
    again = place.tensor > 0
    if place.stage == 0:
        yield Weight("embedding.word_embeddings.weight", (f"{body}embed_tokens.weight",), "vocabulary")
    for number, layer in enumerate(layers_of_stage(shape.layers, mesh, place.stage)):
        yield from _layer(f"decoder.layers.{number}.", f"{body}layers.{layer}.", shape, mesh, place)
    if not last:
        return
    yield Weight("decoder.final_layernorm.weight", (f"{body}norm.weight",), "whole", copied=again)
    if shape.critic:
        for name in ("weight", "bias"):
            yield Weight(f"value.{name}", (f"head.{name}",), "whole", copied=again)
    elif not shape.tied:
        yield Weight("output_layer.weight", ("lm_head.weight",), "vocabulary")
    elif mesh.pipeline > 1:
        yield Weight("output_layer.weight", (f"{body}embed_tokens.weight",), "vocabulary", copied=True)


def _layer(own: str, source: str, shape: Shape, mesh: MeshShape, place: Place) -> Iterator[Weight]:
    again = place.tensor > 0
    attention, theirs = f"{own}self_attention.", f"{source}self_attn."
    yield Weight(f"{own}input_layernorm.weight", (f"{source}input_layernorm.weight",), "whole", copied=again)
    for name in ("weight", "bias") if shape.biased else ("weight",):
        parts = tuple(f"{theirs}{letter}_proj.{name}" for letter in "qkv")
        yield Weight(f"{attention}linear_qkv.{name}", parts, "qkv")
    if shape.normed:
        for letter in "qk":
            name = f"{attention}{letter}_layernorm.weight"
            yield Weight(name, (f"{theirs}{letter}_norm.weight",), "whole", copied=again)
    yield Weight(f"{attention}linear_proj.weight", (f"{theirs}o_proj.weight",), "columns")
    norm = (f"{source}post_attention_layernorm.weight",)
    yield Weight(f"{own}pre_mlp_layernorm.weight", norm, "whole", copied=again)
    if not shape.experts:
        halves = (f"{source}mlp.gate_proj.weight", f"{source}mlp.up_proj.weight")
        yield Weight(f"{own}mlp.linear_fc1.weight", halves, "gate_up")
        yield Weight(f"{own}mlp.linear_fc2.weight", (f"{source}mlp.down_proj.weight",), "columns")
        return
    yield Weight(f"{own}mlp.router.weight", (f"{source}mlp.gate.weight",), "whole", copied=again)
    for number, expert in enumerate(experts_of(shape.experts, mesh, place)):
        name = f"{own}mlp.experts.local_experts.{number}."
        yield Weight(f"{name}linear_fc1.weight", (f"{source}mlp.experts.gate_up_proj",), "gate_up", expert)
        yield Weight(f"{name}linear_fc2.weight", (f"{source}mlp.experts.down_proj",), "columns", expert)


def places(
    weight: Weight, shape: Shape, own: Tensor, source: str, whole: Tensor, part: int, parts: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield what corresponds of a rank's weight and of one of the whole weights that it is made of.

    Args:
        weight: Which weight.
        shape: The model.
        own: The rank's tensor, contiguous.
        source: Which of `weight.sources`.
        whole: The whole of it, contiguous.
        part: Which of a layer's parts the rank holds.
        parts: How many there are.

    Yields:
        A view of `own`, and a view of `whole` of the same shape.
    """
    if weight.expert is not None:
        whole = whole[weight.expert]
    if weight.kind == "whole":
        yield own, whole
    elif weight.kind == "columns":
        width = own.shape[1]
        yield own, whole[:, part * width : (part + 1) * width]
    elif weight.kind == "vocabulary":
        theirs = whole[part * len(own) : (part + 1) * len(own)]
        yield own[: len(theirs)], theirs
    elif weight.kind == "gate_up":
        yield from _halves(weight, own, source, whole, part, parts)
    else:
        yield _heads(weight, shape, own, source, whole, part, parts)


def _halves(
    weight: Weight, own: Tensor, source: str, whole: Tensor, part: int, parts: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """In each rank the gate's rows lie above those of what is gated. Of an expert the model has both in one weight."""
    rows = len(own) // 2
    for half in (0, 1):
        mine = own[half * rows : (half + 1) * rows]
        if len(weight.sources) == 1:
            start = (half * parts + part) * rows
            yield mine, whole[start : start + rows]
        elif weight.sources[half] == source:
            yield mine, whole[part * rows : (part + 1) * rows]


def _heads(
    weight: Weight, shape: Shape, own: Tensor, source: str, whole: Tensor, part: int, parts: int
) -> tuple[Tensor, Tensor]:
    """Of each group of heads there are its queries, then its key and its value."""
    groups, each = shape.groups // parts, shape.heads // shape.groups
    heads = (slice(0, each), slice(each, each + 1), slice(each + 1, each + 2))[weight.sources.index(source)]
    mine = own.view(groups, each + 2, -1, *own.shape[1:])[:, heads]
    theirs = whole.view(shape.groups, heads.stop - heads.start, -1, *whole.shape[1:])
    return mine, theirs[part * groups : (part + 1) * groups]


@dataclass(frozen=True, slots=True)
class Block:
    """Rows of one of Megatron's weights that are a box of one of the whole weights.

    Attributes:
        start: How many of the rank's numbers lie before them.
        offset: Where the box begins in the whole weight.
        sizes: The box's sizes.
    """

    start: int
    offset: tuple[int, ...]
    sizes: tuple[int, ...]


def blocks(
    weight: Weight,
    shape: Shape,
    own: tuple[int, ...],
    source: str,
    whole: tuple[int, ...],
    part: int,
    parts: int,
) -> Iterator[Block]:
    """Yield what of a rank's weight is of one of the whole weights that it is made of.

    Args:
        weight: Which weight.
        shape: The model.
        own: Shape of the rank's tensor.
        source: Which of `weight.sources`.
        whole: Shape of the whole of it.
        part: Which of a layer's parts the rank holds.
        parts: How many there are.
    """
    width = prod(own[1:])
    axis = len(whole) - len(own)
    rank, model = (torch.empty(size, device="meta") for size in (own, whole))
    for mine, theirs in places(weight, shape, rank, source, model, part, parts):
        # Of several groups of heads, each has its own place in the rank's weight.
        pairs = [(mine, theirs)] if mine.is_contiguous() else zip(mine, theirs, strict=True)
        for one, other in pairs:
            if rows := one.numel() // width:
                offset = _place(int(other.storage_offset()), whole)
                yield Block(int(one.storage_offset()), offset, (*(1,) * axis, rows, *own[1:]))


def boxes(block: Block, start: int, stop: int) -> Iterator[ArrayBox]:
    """Yield the boxes that a stretch of the rank's numbers has of a block: places in the whole weight.

    Args:
        block: Rows of the rank's weight.
        start: The first number of the stretch.
        stop: The first one behind it.
    """
    first, end = max(start, block.start), min(stop, block.start + prod(block.sizes))
    for own, offset, sizes in boxes_of_stretch(block.sizes, first - block.start, end - block.start):
        place = tuple(at + inside for at, inside in zip(block.offset, offset, strict=True))
        yield ArrayBox(range(own.start + block.start, own.stop + block.start), place, sizes)


def _place(number: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Where a number of a tensor is, counted in each dimension."""
    place = []
    for size in reversed(sizes):
        number, index = divmod(number, size)
        place.append(index)
    return tuple(reversed(place))
