"""Weights on disk, in Hugging Face layout, for servers that read them from there."""

import copy
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, Protocol, Self

from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel

from rollgym.trainer.core.errors import RunError
from rollgym.trainer.core.run_files import run_lock
from rollgym.trainer.models.shards import ShardWriter

_VERSION = "version-"
_UNFINISHED = "unfinished-"
_ADAPTER = "adapter-"
_START = "start"
_GIB = 2**30


class WeightFolderError(RunError):
    """The weights of a version cannot be written; the message says why and what to do."""


class FolderLayout(Protocol):
    """What lies beside the weights in a model's folder, and under which names they stand there."""

    def write_beside(self, folder: Path) -> None:
        """Write what stays the same in all versions: configuration, tokenizer."""
        ...

    def arrange(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors as a server reads them."""
        ...


class ModelLayout:
    """A model's folder as `save_pretrained` writes it.

    Args:
        model: Whose configuration is written.
        tokenizer: Written beside it.
        separate_head: Whether an output layer that is the embedding is written as a tensor of its own, with a
            configuration that says so. A server that loads such a folder has two tensors, and reloads both.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any, *, separate_head: bool = False) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._head = shared_head(model) if separate_head else None

    def write_beside(self, folder: Path) -> None:
        """Write configuration, generation settings and tokenizer."""
        config = copy.deepcopy(self._model.config)
        # What the model's own `save_pretrained` adds; servers take a model without it for one that only embeds.
        config.architectures = [type(self._model).__name__]
        config.dtype = self._model.dtype
        if self._head is not None:
            config.tie_word_embeddings = False
            config.get_text_config().tie_word_embeddings = False
        config.save_pretrained(folder)
        if self._model.generation_config is not None:
            self._model.generation_config.save_pretrained(folder)
        self._tokenizer.save_pretrained(folder)

    def arrange(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors, and a separate head behind the embedding that it shares."""
        for name, tensor in tensors:
            yield name, tensor
            if self._head is not None and name == self._head.embedding:
                yield self._head.name, tensor.clone()


@dataclass(frozen=True, slots=True)
class SharedHead:
    """An output layer whose weights are the embedding's.

    Attributes:
        name: Name of its weights.
        embedding: Name of the weights that it shares.
    """

    name: str
    embedding: str


def shared_head(model: PreTrainedModel) -> SharedHead | None:
    """Return the output layer that is the embedding; None where a model has its own."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or head.weight is not embedding.weight:
        return None
    names = [name for name, each in model.named_parameters(remove_duplicate=False) if each is head.weight]
    outer = {
        f"{name}.weight" for name, module in model.named_modules(remove_duplicate=False) if module is head
    }
    return SharedHead(
        name=next(name for name in names if name in outer),
        embedding=next(name for name in names if name not in outer),
    )


class WeightFolders:
    """One folder for each version, whole or not there at all.

    A folder is written beside the others under a temporary name, which no server reads, and renamed when it is whole.
    All of them are copies of what the trainer has: they are removed with it.

    Args:
        directory: The parent of the folders; this process alone writes there.
        layout: The files that are written beside the weights.
        shard_bytes: Largest file of weights, but for single tensors that are larger.
        seen_as: The directory as servers see it; as it is called here if None.
    """

    def __init__(
        self, directory: Path, layout: FolderLayout, shard_bytes: int = _GIB, seen_as: PurePath | None = None
    ) -> None:
        # A server's working directory is its own.
        self._directory = directory.absolute()
        self._layout = layout
        self._shard_bytes = shard_bytes
        self._seen_as = seen_as
        self._lock = ExitStack()
        self.bytes_written = 0

    def __enter__(self) -> Self:
        """Take the directory, and clear away what a killed process left.

        Raises:
            ConfigError: If another process writes there.
        """
        self._lock.enter_context(run_lock(self._directory, "weights.directory"))
        self._clear()
        return self

    def __exit__(self, *_: object) -> None:
        self._clear()
        self._lock.close()

    def write(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> Path:
        """Write the weights of a version and return their folder, as servers see it.

        Raises:
            WeightFolderError: If the disk does not take them; nothing of them is left on it.
        """
        return self._write_tensors(f"{_VERSION}{version:08d}", f"the weights of version {version}", tensors)

    def write_start(self, tensors: Iterable[tuple[str, Tensor]]) -> Path:
        """Write the model that servers are started and restarted with.

        Raises:
            WeightFolderError: If the disk does not take it.
        """
        return self._write_tensors(_START, "the model that servers start with", tensors)

    def write_adapter(self, version: int, save: Callable[[Path], None]) -> Path:
        """Write the adapters of a version, alone, and return their folder as servers see it.

        Args:
            version: Theirs.
            save: Writes them into a folder.

        Raises:
            WeightFolderError: If the disk does not take them.
        """

        def fill(folder: Path) -> int:
            save(folder)
            return sum(file.stat().st_size for file in folder.iterdir())

        return self._write(f"{_ADAPTER}{version:08d}", f"the adapters of version {version}", fill)

    def _write_tensors(self, name: str, what: str, tensors: Iterable[tuple[str, Tensor]]) -> Path:
        def fill(folder: Path) -> int:
            self._layout.write_beside(folder)
            shards = ShardWriter(folder, self._shard_bytes)
            for tensor_name, tensor in self._layout.arrange(tensors):
                shards.add(tensor_name, tensor)
            shards.close()
            return shards.total_bytes

        return self._write(name, what, fill)

    def _write(self, name: str, what: str, fill: Callable[[Path], int]) -> Path:
        unfinished, folder = self._directory / f"{_UNFINISHED}{name}", self._directory / name
        try:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
            written = fill(unfinished)
            for file in unfinished.iterdir():
                file.chmod(0o644)  # a server may be another user's
            if folder.exists():  # a step that failed after it was published is played again
                shutil.rmtree(folder)
            unfinished.rename(folder)
        except (OSError, SafetensorError) as error:
            room = _room_in(self._directory)
            shutil.rmtree(unfinished, ignore_errors=True)
            raise WeightFolderError(
                f"cannot write {what} to {folder}: {error}; {room}, or name another disk by weights.directory"
            ) from error
        self.bytes_written += written
        return folder if self._seen_as is None else Path(self._seen_as / folder.name)

    def keep_only(self, version: int) -> None:
        """Remove the folders of all other versions: no server reads them any more."""
        for prefix in (_VERSION, _ADAPTER):
            for folder in self._directory.glob(f"{prefix}*"):
                if folder.name != f"{prefix}{version:08d}":
                    shutil.rmtree(folder, ignore_errors=True)

    def _clear(self) -> None:
        for pattern in (f"{_UNFINISHED}*", f"{_VERSION}*", f"{_ADAPTER}*", _START):
            for folder in self._directory.glob(pattern):
                shutil.rmtree(folder, ignore_errors=True)


def _room_in(directory: Path) -> str:
    """Return what to do about the room that is left on a directory's disk."""
    try:
        free = shutil.disk_usage(directory).free
    except OSError:  # the very disk may be gone
        return f"{directory} is not there: bring it back"
    return f"{free / _GIB:.2f} GiB are free there: free some"
