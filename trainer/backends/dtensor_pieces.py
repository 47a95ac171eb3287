"""Weights as DTensors: what `fully_shard` leaves of a model's parameters in each rank."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from rollgym.trainer.backends.heads import Head
from rollgym.trainer.backends.whole_model import divided_like
from rollgym.trainer.models.lora import adapter_tensors
from rollgym.trainer.models.weights import parameters_of


class DTensorPieces:
    """Weights as DTensors: what `fully_shard` leaves of a model's parameters in each rank.

    Args:
        head: The model and what is read off it, divided already.
        named: The weights that a checkpoint holds, by name.
    """

    def __init__(self, head: Head, named: Mapping[str, Tensor]) -> None:
        self._head = head
        self._named = named

    def names(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield names and whole shapes of the weights that a checkpoint holds."""
        for name, parameter in self._named.items():
            yield name, tuple(parameter.shape)

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's pieces of what a checkpoint holds, by name."""
        for name, parameter in self._named.items():
            yield name, parameter.detach()

    def held(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what this rank holds of each weight that the model computes with, by name."""
        for name, parameter in self._head.model.named_parameters():
            yield name, local_of(parameter.detach())

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the whole weights by the names of the modules, with adapters added, gathered one at a time."""
        for name, tensor in parameters_of(self._head.model):
            yield name, whole_of(tensor)

    def adapters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the whole adapters by the names that peft saves them with."""
        for name, tensor in adapter_tensors(self._head.model):
            yield name, whole_of(tensor)

    def put_adapters(self, tensors: Mapping[str, Tensor]) -> None:
        """Have the model compute with other adapters, which all ranks have whole."""
        for name, tensor in adapter_tensors(self._head.model):
            self._copy(tensor, tensors[name])

    def masters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what a checkpoint holds, whole, gathered one at a time."""
        for name, parameter in self._named.items():
            yield name, whole_of(parameter.detach())

    def take(self, name: str, whole: Tensor) -> None:
        """Take a weight that all ranks have whole."""
        self._copy(self._named[name], whole)

    @torch.no_grad()
    def _copy(self, piece: Tensor, whole: Tensor) -> None:
        # In place: the library reads the memory that pieces lie in.
        local_of(piece).copy_(local_of(divided_like(piece, whole)))

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Take weights apart again afterwards, which a forward without a backward leaves whole."""
        try:
            yield
        finally:
            for module in self._head.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    def move(self, device: torch.device) -> None:
        """Bring this rank's pieces to a device's memory."""
        # The library moves the memory that it gathers from along with the parameters.
        self._head.to(device)


def whole_of(content: Any) -> Any:
    """Return the whole of a tensor that ranks divide, which gather it together; anything else as it is."""
    return content.full_tensor() if isinstance(content, DTensor) else content


def local_of(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
