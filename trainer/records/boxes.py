"""A tensor of which a rank holds some boxes, as torch.distributed.checkpoint writes and reads them."""

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


class Box(NamedTuple):
    """A box of an array that is a contiguous run of its numbers in row-major order.

    Attributes:
        own: The part of the run that the box covers.
        offset: Its first index in each dimension of the array.
        sizes: Its sizes.
    """

    own: range
    offset: tuple[int, ...]
    sizes: tuple[int, ...]


def boxes_of_stretch(sizes: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Yield the fewest boxes that make up a run of an array's numbers, which may begin and end within a row.

    Args:
        sizes: The array's sizes.
        start: Index of the run's first number.
        stop: Index of the first number after it.
    """
    # As one row of arrays: all of it is a box like the others, and a single number is one, too.
    whole = (1, *sizes)
    widths = [prod(whole[axis + 1 :]) for axis in range(len(whole))]
    at = start
    while at < stop:
        axis = next(axis for axis, width in enumerate(widths) if at % width == 0 and width <= stop - at)
        place = [at // width % size for size, width in zip(whole, widths, strict=True)]
        rows = min((stop - at) // widths[axis], whole[axis] - place[axis])
        box = (*(1,) * axis, rows, *whole[axis + 1 :])
        end = at + rows * widths[axis]
        yield Box(range(at, end), tuple(place[1:]), box[1:])
        at = end


class HeldBox(NamedTuple):
    """A box of a tensor.

    Attributes:
        offset: Its first index in each dimension of the whole tensor.
        content: Its numbers: a view of the memory that holds them.
        copied: Whether another rank writes it.
    """

    offset: tuple[int, ...]
    content: Tensor
    copied: bool = False


class BoxedTensor(Tensor):
    """A tensor of which this rank holds some boxes; nothing can be computed with it.

    It has the whole's shape, and what torch's checkpoints ask tensors for that know how they are divided.

    Args:
        shape: The whole's shape.
        held: The boxes, without overlap. They may be empty.
    """

    held: Sequence[HeldBox]
    _by_offset: Mapping[torch.Size, Tensor]

    @staticmethod
    def __new__(cls, shape: Sequence[int], held: Sequence[HeldBox]) -> "BoxedTensor":
        """Make one; it takes no memory."""
        dtype = held[0].content.dtype if held else torch.float32
        made = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=dtype, device=torch.device("cpu")
        )
        made.held = held
        made._by_offset = {torch.Size(box.offset): box.content for box in held}
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuse to compute.

        Raises:
            TypeError: Always.
        """
        raise TypeError(f"{func} cannot be computed of a tensor of which a rank holds boxes")

    @classmethod
    def of_stretch(cls, shape: Sequence[int], start: int, held: Tensor) -> "BoxedTensor":
        """Return the tensor of which this rank holds a run of numbers, in row-major order.

        Args:
            shape: The whole's shape.
            start: Index of the run's first number.
            held: The run `[numbers]`, as held in memory. It may be empty.
        """
        boxes = boxes_of_stretch(shape, start, start + held.numel())
        return cls(
            shape,
            [
                HeldBox(box.offset, held[box.own.start - start : box.own.stop - start].view(box.sizes))
                for box in boxes
            ],
        )

    def finite(self) -> Tensor:
        """Return whether all numbers that this rank holds are finite."""
        flags = [box.content.isfinite().all() for box in self.held]
        return torch.stack(flags).all() if flags else torch.ones((), dtype=torch.bool)

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        """Return what this rank has to write of it."""
        return [
            WriteItem(
                MetadataIndex(fqn, torch.Size(box.offset)),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(_chunk(box), TensorProperties(box.content.dtype), self.size()),
            )
            for box in self.held
            if not box.copied
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return what this rank has to read of it."""
        return [_chunk(box) for box in self.held]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """Return a box by its first index in each dimension."""
        assert index.offset is not None
        return self._by_offset[index.offset]


def _chunk(box: HeldBox) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offset), box.content.size())
