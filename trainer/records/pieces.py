"""A part of a checkpoint that several ranks wrote together, each its own pieces (torch.distributed.checkpoint)."""

import json
import pickle
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
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
