"""The weights of a model that ranks divide: first whole in one rank, then in pieces, some of each in every rank.

Every rank has the model's shell: its modules, buffers, ties and settings, with weights that take no room. A part of the
shell gets its weights just before it is divided, one tensor after the other, from the first rank. So the host's memory
holds a model once, however many ranks are on a machine, and files are read once.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from rollgym.trainer.backends.heads import Head
from rollgym.trainer.backends.rank_group import RankGroup
from rollgym.trainer.models.lora import adapter_tensors
from rollgym.trainer.models.weights import parameters_of


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


class WholeModel:
    """The weights that the ranks of a group divide.

    Attributes:
        shell: The head without weights, in every rank one of its own.

    Args:
        head: The model and what is read off it. It is the first rank's that counts, and it is emptied while parts of
            the shell are filled; others may have none.
        group: The ranks; all of them make the same calls together.
        look: Called with the head while it is whole: what it finds out and keeps goes into the shells.
    """

    def __init__(self, head: Head | None, group: RankGroup, look: Callable[[Head], object]) -> None:
        self._group = group
        self._weights: dict[str, nn.Parameter] = {}
        shell: Head | None = None
        if group.rank == 0:
            assert head is not None, "the first rank has the model"
            look(head)
            self._weights = dict(head.named_parameters())
            shell = shell_of(head)
        (found,) = group.objects_from_first([shell])
        assert isinstance(found, Head)
        self.shell: Head = found
        # Layers that are divided keep their names, and not their parameters.
        names = {parameter: name for name, parameter in self.shell.named_parameters()}
        self._places = [
            (module, key, names[parameter])
            for module in self.shell.modules()
            for key, parameter in module._parameters.items()
            if parameter is not None
        ]

    @torch.no_grad()
    def fill(self, module: nn.Module) -> None:
        """Give a part of the shell the weights that it does not have yet.

        Args:
            module: The part; tied weights are given to one and the same part.
        """
        inside = set(module.modules())
        filled: dict[str, nn.Parameter] = {}
        for owner, key, name in self._places:
            empty = owner._parameters[key]
            if owner not in inside or empty is None or not _is_empty(empty):
                continue
            if name not in filled:
                whole = self._from_first(name, empty)
                filled[name] = nn.Parameter(divided_like(empty, whole), requires_grad=empty.requires_grad)
            owner._parameters[key] = filled[name]

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the whole weights in all ranks, one after the other and tied ones once; the shell stays empty.

        They are for a model that is built apart from the shell. The first rank's own are gone once they are read.
        """
        for name, empty in self.shell.named_parameters():
            yield name, self._from_first(name, empty)

    def _from_first(self, name: str, empty: Tensor) -> Tensor:
        if self._group.rank != 0:
            whole = torch.empty(empty.shape, dtype=empty.dtype, device=self._group.device)
            return self._group.from_first(whole)
        given = self._weights.pop(name)
        whole = self._group.from_first(given.detach().to(self._group.device).contiguous())
        given.data = torch.empty(0, dtype=given.dtype)
        return whole


def shell_of(head: Head) -> Head:
    """Return a copy of a head whose weights take no room; tied ones are tied in it, too."""
    weights = {
        id(parameter): nn.Parameter(
            torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad
        )
        for parameter in head.parameters()
    }
    return copy.deepcopy(head, dict(weights))


def divided_like(parameter: Tensor, whole: Tensor) -> Tensor:
    """Return this rank's piece of a tensor that is to be divided as `parameter` is."""
    if not isinstance(parameter, DTensor):
        return whole if _is_empty(parameter) else whole.to(parameter.device)
    device = whole.device if _is_empty(parameter) else parameter.device
    return distribute_tensor(
        whole.to(device), parameter.device_mesh, parameter.placements, src_data_rank=None
    )


def _is_empty(parameter: Tensor) -> bool:
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return local.is_meta


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
