"""A part of a checkpoint that several ranks wrote together, each its own pieces (torch.distributed.checkpoint).

A rank may hold some boxes of a tensor: parts of it that are ranges along each of its axes.
"""

import json
import pickle
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

_PLAIN = "plain.json"
_SEPARATOR = "\t"


class InPieces(Protocol):
    """A part of a checkpoint whose owners write it themselves."""

    def write(self, folder: Path) -> None:
        """Write it into an empty folder."""
        ...


class SavedPieces:
    """A part of a checkpoint, in a folder of its own.

    Args:
        folder: The folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the whole shapes of its tensors, by paths.

        Raises:
            ValueError: If it cannot be read.
        """
        return {path: tuple(entry.size) for path, entry in self._stored().items()}

    def plain(self) -> dict[str, Any]:
        """Return the values that are not tensors, by path."""
        plain: dict[str, Any] = json.loads((self.folder / _PLAIN).read_text(encoding="utf-8"))
        return plain

    def whole(self) -> dict[str, Any]:
        """Return all of it as one process has it, assembled on the CPU."""
        stored = self._stored().items()
        tensors = {path: torch.empty(entry.size, dtype=entry.properties.dtype) for path, entry in stored}
        with warnings.catch_warnings(), _plain_errors():
            # That no ranks are there is what is meant.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            load(tensors, checkpoint_id=self.folder, no_dist=True)
        return nested(iter([*tensors.items(), *self.plain().items()]))

    def _stored(self) -> dict[str, TensorStorageMetadata]:
        try:
            stored = FileSystemReader(self.folder).read_metadata().state_dict_metadata
        except (OSError, pickle.UnpicklingError, EOFError, AttributeError) as error:
            raise ValueError(f"{self.folder} cannot be read: {type(error).__name__}") from error
        return {path: entry for path, entry in stored.items() if isinstance(entry, TensorStorageMetadata)}


def whole_state(state: Any) -> Mapping[str, Any]:
    """Return a part of a checkpoint as one process has it, however it was written."""
    whole: Mapping[str, Any] = state.whole() if isinstance(state, SavedPieces) else state
    return whole


def write_pieces(
    folder: Path, tensors: Mapping[str, Tensor], plain: Mapping[str, Any], *, first: bool
) -> None:
    """Write this rank's pieces; all ranks call it together.

    Args:
        folder: The target, a folder that all ranks share.
        tensors: DTensors, or tensors that all ranks hold whole, in float32, by paths.
        plain: The values that are not tensors, by path; JSON values.
        first: Whether this is the first rank, which writes `plain`.

    Raises:
        OSError: If writing fails, in any rank.
        RuntimeError: If a rank fails for another reason.
    """
    if first:
        (folder / _PLAIN).write_text(json.dumps(plain), encoding="utf-8")
    with _plain_errors():
        save(dict(tensors), checkpoint_id=folder)


def read_pieces(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Read this rank's pieces into tensors, however many ranks wrote them; all ranks call it together.

    Raises:
        OSError: If a file cannot be read.
        RuntimeError: If what is in it cannot be understood.
    """
    with _plain_errors():
        load(dict(tensors), checkpoint_id=folder)


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Raise what torch's checkpoints came to in any rank as what it is; their own error is no `Exception` at all."""
    try:
        yield
    except CheckpointException as failed:
        rank, (error, _) = min(failed.failures.items(), key=lambda each: each[0])
        on_disk = next((each for each, _ in failed.failures.values() if isinstance(each, OSError)), None)
        if on_disk is not None:
            raise on_disk from failed
        raise RuntimeError(f"rank {rank}: {type(error).__name__}: {error}") from error


def flattened(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield what a tree of dictionaries holds, by paths."""
    if not isinstance(tree, Mapping) or not tree:
        yield path, tree
        return
    for key, content in tree.items():
        kind = "#" if isinstance(key, int) else ""
        yield from flattened(content, f"{path}{_SEPARATOR if path else ''}{kind}{key}")


def nested(parts: Iterator[tuple[str, Any]]) -> dict[str, Any]:
    """Return the tree with the given contents by path."""
    tree: dict[Any, Any] = {}
    for path, content in parts:
        *branches, leaf = [_key(part) for part in path.split(_SEPARATOR)]
        place = tree
        for branch in branches:
            place = place.setdefault(branch, {})
        place[leaf] = content
    return tree


def _key(part: str) -> str | int:
    return int(part[1:]) if part.startswith("#") else part


class ArrayBox(NamedTuple):
    """A box of an array that is a contiguous run of its numbers in row-major order.

    Attributes:
        own: The part of the run that the box covers.
        offset: Its first index in each dimension of the array.
        sizes: Its sizes.
    """

    own: range
    offset: tuple[int, ...]
    sizes: tuple[int, ...]


def boxes_of_stretch(sizes: Sequence[int], start: int, stop: int) -> Iterator[ArrayBox]:
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
        yield ArrayBox(range(at, end), tuple(place[1:]), box[1:])
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
