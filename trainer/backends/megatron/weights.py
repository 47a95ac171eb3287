"""A model's weights, of which each rank holds Megatron's parts, by the names that all other backends have for them."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rollgym.trainer.backends.megatron.conversion import Shape, Weight, blocks, boxes, places, weights_of
from rollgym.trainer.backends.megatron.layout import Place
from rollgym.trainer.backends.rank_group import RankGroup
from rollgym.trainer.records.pieces import BoxedTensor, HeldBox


class States(Protocol):
    """What the ranks hold for the optimizer of a weight.

    Attributes:
        divided: Whether each of the ranks with the same weights holds a stretch of it. If not, each holds all.
    """

    divided: bool

    def stretch(self, parameter: Tensor, key: str) -> tuple[int, Tensor] | None:
        """Return the offset of this rank's stretch of a weight, and its content; None if the rank holds none of it."""
        ...

    def read(self, parameter: Tensor, key: str) -> Tensor:
        """Return a tensor of the parameter's shape in float32, zero where other ranks hold it."""
        ...

    def write(self, parameter: Tensor, key: str, content: Tensor) -> None:
        """Take of a tensor of the parameter's shape what this rank holds."""
        ...


class MegatronPieces:
    """The weights of a model that Megatron divides. All ranks make the same calls together.

    Args:
        body: This rank's part of the model.
        group: The ranks.
        shape: The model's shape.
        sizes: Names of the whole weights in the order of the model's own modules, and their shapes; tied ones once.
        dtype: Type of numbers that the model computes in.

    Attributes:
        states: Holds the weights as they are trained, in float32; None if the model is not trained.
    """

    def __init__(
        self,
        body: nn.Module,
        group: RankGroup,
        shape: Shape,
        sizes: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype,
    ) -> None:
        self.states: States | None = None
        self._group = group
        self._shape = shape
        self._body = body
        self._sizes = dict(sizes)
        self._dtype = dtype
        self._place = Place.of(group.shape, group.rank)
        own = dict(body.named_parameters())
        weights = list(weights_of(shape, group.shape, self._place))
        if odd := own.keys() ^ {weight.name for weight in weights}:
            raise ValueError(
                f"Megatron's modules hold other weights than is known here: {', '.join(sorted(odd))}"
            )
        self._own: dict[str, list[tuple[Weight, Tensor]]] = {name: [] for name in self._sizes}
        for weight in weights:
            for source in weight.sources:
                self._own[source].append((weight, own[weight.name]))

    def names(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield names and whole shapes of the weights that a checkpoint holds."""
        yield from self._sizes.items()

    def held(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what this rank holds of each weight that the model computes with, by name, or nothing of it.

        If it holds several tensors of one weight (experts), it yields a vector of the largest magnitude of each.
        """
        for name, held in self._own.items():
            tensors = [parameter.detach() for _, parameter in held]
            if len(tensors) != 1:
                largest = [tensor.abs().amax().float() for tensor in tensors]
                tensors = [torch.stack(largest) if largest else torch.empty(0, device=self._group.device)]
            yield name, tensors[0]

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's pieces of what a checkpoint holds, by name."""
        for name in self._sizes:
            yield name, self.piece(name, "param")

    def piece(self, name: str, key: str) -> BoxedTensor:
        """Return this rank's piece of an entry of the optimizer's state of a weight, or of the weight itself."""
        held: list[HeldBox] = []
        for weight, parameter in self._own[name]:
            found = self._stretch(parameter, key)
            if found is None:
                continue
            start, stretch = found
            part, parts = self._place.tensor, self._group.shape.tensor
            own, whole = tuple(parameter.shape), self._sizes[name]
            for block in blocks(weight, self._shape, own, name, whole, part, parts):
                for box in boxes(block, start, start + stretch.numel()):
                    content = stretch[box.own.start - start : box.own.stop - start].view(box.sizes)
                    held.append(HeldBox(box.offset, content, weight.copied))
        return BoxedTensor(self._sizes[name], held)

    def _stretch(self, parameter: Tensor, key: str) -> tuple[int, Tensor] | None:
        if self.states is None:
            return 0, parameter.detach().view(-1)
        return self.states.stretch(parameter, key)

    def move(self, device: torch.device) -> None:
        """Bring this rank's pieces to a device's memory."""
        self._body.to(device)

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the whole weights by the names of the model's own modules, gathered one at a time."""
        for name in self._sizes:
            # What was put on top of a body is in float32, whatever the body computes in.
            dtype = torch.float32 if name.startswith("head.") else self._dtype
            yield name, self._gathered(name, dtype, lambda parameter: parameter, divided=False)

    def adapters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield nothing: there are none."""
        yield from ()

    def put_adapters(self, tensors: Mapping[str, Tensor]) -> None:
        """Do nothing: Megatron's models have no adapters."""

    def masters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what is trained whole and as exactly as it is held, gathered one at a time."""
        if self.states is None:
            yield from self.parameters()
            return
        for name in self._sizes:
            yield name, self.state(name, "param")

    @torch.no_grad()
    def take(self, name: str, whole: Tensor) -> None:
        """Take of a weight that all ranks have whole what this one holds; one that is not ours is left out."""
        if name not in self._own:
            return
        for weight, parameter in self._own[name]:
            for mine, theirs in self._places(weight, parameter.data, name, whole):
                mine.copy_(theirs)
        if self.states is not None:
            self.put(name, "param", whole)

    @torch.no_grad()
    def put(self, name: str, key: str, whole: Tensor) -> None:
        """Take of what all ranks have whole of the optimizer's state of a weight what this one holds."""
        assert self.states is not None
        for weight, parameter in self._own[name]:
            content = self.states.read(parameter, key)
            for mine, theirs in self._places(weight, content, name, whole):
                mine.copy_(theirs)
            self.states.write(parameter, key, content)

    def state(self, name: str, key: str) -> Tensor:
        """Return the whole of an entry of the optimizer's state of a weight, in float32."""
        held = self.states
        assert held is not None
        return self._gathered(
            name, torch.float32, lambda parameter: held.read(parameter, key), divided=held.divided
        )

    @torch.no_grad()
    def _gathered(
        self, name: str, dtype: torch.dtype, of: Callable[[Tensor], Tensor], *, divided: bool
    ) -> Tensor:
        """Return a whole in all ranks.

        Args:
            name: The weight's name.
            dtype: Type of its numbers.
            of: Returns of a rank's parameter what is gathered, of the same shape.
            divided: Whether each of the ranks with the same weights has a stretch of it. If not, one of them speaks.
        """
        whole = torch.zeros(self._sizes[name], dtype=dtype, device=self._group.device)
        for weight, parameter in self._own[name]:
            if weight.copied or not (divided or self._speaks(weight)):
                continue
            for mine, theirs in self._places(weight, of(parameter), name, whole):
                theirs.copy_(mine)
        # Each number comes from one rank; as bytes it arrives as it is, whatever its sign.
        dist.all_reduce(whole.view(-1).view(torch.uint8))
        return whole

    def each_finite(self, of: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """Return by the names of weights whether what this rank has of each is finite.

        Args:
            of: Returns of a rank's parameter what is looked at.
        """
        found = {name: torch.ones((), dtype=torch.bool, device=self._group.device) for name in self._own}
        for name, held in self._own.items():
            for _, parameter in held:
                found[name] = found[name] & of(parameter).isfinite().all()
        return found

    def computing(self) -> AbstractContextManager[object]:
        """Entered while outputs are computed without gradient: nothing is to be done."""
        return nullcontext()

    def _speaks(self, weight: Weight) -> bool:
        mesh = self._group.shape
        replica = self._group.rank // mesh.tensor % (mesh.context * mesh.data)
        return (replica if weight.expert is None else replica // mesh.expert) == 0

    def _places(
        self, weight: Weight, own: Tensor, name: str, whole: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        part, parts = self._place.tensor, self._group.shape.tensor
        return places(weight, self._shape, own, name, whole, part, parts)
