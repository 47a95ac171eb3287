"""Which boxes of the whole weights a stretch of one of Megatron's is: pure arithmetic.

The distributed optimizer gives each of the ranks with the same weights a stretch of each, wherever in a row it begins
and ends. A checkpoint that ranks write in pieces knows boxes of whole weights, by offsets and sizes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch

from rollgym.trainer.backends.megatron.conversion import Shape, Weight, places
from rollgym.trainer.records.boxes import Box, boxes_of_stretch


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


def boxes(block: Block, start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes that a stretch of the rank's numbers has of a block: places in the whole weight.

    Args:
        block: Rows of the rank's weight.
        start: The first number of the stretch.
        stop: The first one behind it.
    """
    first, end = max(start, block.start), min(stop, block.start + prod(block.sizes))
    for own, offset, sizes in boxes_of_stretch(block.sizes, first - block.start, end - block.start):
        place = tuple(at + inside for at, inside in zip(block.offset, offset, strict=True))
        yield Box(range(own.start + block.start, own.stop + block.start), place, sizes)


def _place(number: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Where a number of a tensor is, counted in each dimension."""
    place = []
    for size in reversed(sizes):
        number, index = divmod(number, size)
        place.append(index)
    return tuple(reversed(place))
