"""A tensor of which a rank holds some boxes, as torch.distributed.checkpoint writes and reads them."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


class HeldBox(NamedTuple):
    """A box of a tensor.

    Attributes:
        offset: Where it begins in the whole.
        content: What is in it: a view of the memory where it is held.
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
        held: The boxes, none of which overlap. There may be none.
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
        """Return a box by where it begins."""
        assert index.offset is not None
        return self._by_offset[index.offset]


def _chunk(box: HeldBox) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offset), box.content.size())
