"""The weights of a model that several ranks hold, each a piece of them."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor


class WeightPieces(Protocol):
    """The weights of a model, of which each rank holds pieces. All ranks make the same calls together."""

    def names(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield names and whole shapes of the weights that a checkpoint holds."""
        ...

    def held(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what this rank holds of each weight that the model computes with, by name."""
        ...

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the whole weights by the names of the modules, with adapters added, gathered one at a time."""
        ...

    def adapters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the whole adapters by the names that peft saves them with."""
        ...

    def put_adapters(self, tensors: Mapping[str, Tensor]) -> None:
        """Have the model compute with other adapters, which all ranks have whole; what is stepped stays as it is."""
        ...

    def masters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what a checkpoint holds, whole and as exactly as it is held, gathered one at a time."""
        ...

    def take(self, name: str, whole: Tensor) -> None:
        """Take a weight that all ranks have whole."""
        ...

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's pieces of what a checkpoint holds, by name: the memory in which they are trained."""
        ...

    def computing(self) -> AbstractContextManager[object]:
        """Entered while outputs are computed without gradient."""
        ...

    def move(self, device: torch.device) -> None:
        """Bring this rank's pieces to a device's memory."""
        ...
