"""Tensors written to files in Hugging Face layout, at most one file's tensors in memory at a time."""

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

SHARD_BYTES = 2**30
"""Size from which on another file is begun."""


_NUMBER = re.compile(r"\(os error (\d+)\)")


@contextmanager
def disk_errors(file: Path) -> Iterator[None]:
    """Raise what safetensors says of a disk as the error of the system that it is.

    Args:
        file: The file that is written inside the context.

    Raises:
        OSError: If the disk does not take it.
    """
    try:
        yield
    except SafetensorError as error:
        number = _NUMBER.search(str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(file)) from error


@dataclass
class ShardWriter:
    """Writes tensors to files, none much larger than `limit` bytes unless a single tensor is.

    Attributes:
        folder: The target folder; it exists, and contains no other shards.
        limit: Size from which on another file is begun.
        total_bytes: Bytes added so far.
    """

    folder: Path
    limit: int = SHARD_BYTES
    total_bytes: int = 0
    _held: dict[str, Tensor] = field(default_factory=dict)
    _held_bytes: int = 0
    _files: list[list[str]] = field(default_factory=list)

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor; it is written now or later."""
        size = tensor.numel() * tensor.element_size()
        if self._held and self._held_bytes + size > self.limit:
            self._write()
        self._held[name] = tensor.detach().to("cpu").contiguous()
        self._held_bytes += size
        self.total_bytes += size

    def close(self) -> None:
        """Write the buffered tensors, and the index if there are several files."""
        if self._held:
            self._write()
        if len(self._files) == 1:
            (self.folder / _shard_name(1)).rename(self.folder / "model.safetensors")
            return
        weight_map = {
            name: _shard_name(number) for number, names in enumerate(self._files, start=1) for name in names
        }
        index = {"metadata": {"total_size": self.total_bytes}, "weight_map": weight_map}
        (self.folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))

    def _write(self) -> None:
        file = self.folder / _shard_name(len(self._files) + 1)
        with disk_errors(file):
            save_file(self._held, file, metadata={"format": "pt"})
        file.chmod(0o644)  # a server may be another user's
        self._files.append(list(self._held))
        self._held, self._held_bytes = {}, 0


def _shard_name(number: int) -> str:
    return f"model-{number:05d}.safetensors"
