"""The policy as a run began, where several ranks train adapters: the policy itself, with these off."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.backends.base import TrainRow
from trainer.backends.sharded_model import ShardedModel
from trainer.models.lora import adapters_off
from trainer.records.pieces import SavedPieces, read_pieces, write_pieces


class ShardedPolicyWithoutAdapters:
    """The policy itself, with its adapters off, or as they were when the run began: no second model.

    Args:
        policy: The policy's part in this rank.
        warm: Whether adapters were trained before the run began. They are kept then.
    """

    def __init__(self, policy: ShardedModel, *, warm: bool) -> None:
        self._policy = policy
        self._start = policy.adapters() if warm else None
        self._loading: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}

    @property
    def keeps_pieces(self) -> bool:
        """Whether a checkpoint's pieces can be read as they are."""
        return self._policy.keeps_pieces

    def forward(self, rows: Sequence[TrainRow]) -> list[Tensor]:
        """Return the outputs of this rank's rows."""
        model = self._policy.model
        with adapters_off(model) if self._start is None else self._policy.adapters_as(self._start):
            return self._policy.forward(rows)

    def state(self) -> Iterator[tuple[str, Any]]:
        """Yield the adapters that the run began with by paths, if they were not nothing."""
        if not self._start:
            yield "adapters", {}
        for name, tensor in (self._start or {}).items():
            yield f"adapters\t{name}", tensor

    def write_pieces(self, folder: Path) -> None:
        """Write this rank's pieces of the adapters that the run began with, if they were not nothing."""
        plain: dict[str, Any] = {} if self._start else {"adapters": {}}
        write_pieces(folder, self._named(), plain, first=self._policy.is_first)

    def read_pieces(self, folder: Path) -> None:
        """Take them up, of however many ranks that wrote them.

        Raises:
            ValueError: If it is of other adapters.
        """
        if {path: tuple(tensor.shape) for path, tensor in self._named().items()} != SavedPieces(
            folder
        ).shapes():
            raise ValueError("it is of other adapters")
        read_pieces(folder, self._named())

    def _named(self) -> dict[str, Tensor]:
        return {f"adapters\t{name}": tensor for name, tensor in (self._start or {}).items()}

    def begin_load(self, plain: Mapping[str, Any], shapes: Mapping[str, tuple[tuple[int, ...], Any]]) -> None:
        """Look at what is going to be loaded.

        Raises:
            ValueError: If it is of other adapters.
        """
        own = {path: tuple(tensor.shape) for path, tensor in self._named().items()}
        if own != {path: shape for path, (shape, _) in shapes.items()}:
            raise ValueError("it is of other adapters")
        self._loading = dict(shapes)

    def load(self, path: str, tensor: Tensor | None) -> None:
        """Take up a tensor, of which the first rank has the contents."""
        assert self._start is not None
        whole = self._policy.from_first(tensor, *self._loading[path])
        self._start[path.partition("\t")[2]].copy_(whole)

    def end_load(self) -> None:
        """All of it was given."""
        self._loading = {}
