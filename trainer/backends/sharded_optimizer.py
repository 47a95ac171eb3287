"""The optimizer of a sharded model, and the names of its state in checkpoints."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from rollgym.trainer.backends.rank_group import RankGroup
from rollgym.trainer.backends.skipping import LOSS, gradient_named

_STATE = "optimizer\tstate"
_GROUPS = "optimizer\tparam_groups"


class Applied(NamedTuple):
    """What became of a step.

    Attributes:
        norm: Norm of the gradient before clipping.
        taken: Whether the step was taken.
        broken: What was not finite, if not.
    """

    norm: float
    taken: bool
    broken: str = ""


class ShardedOptimizer(Protocol):
    """What turns a share of the loss into a step of all ranks.

    Attributes:
        fused: Whether it is one kernel.
    """

    fused: bool

    def backward(self, share: Tensor, *, last: bool) -> None:
        """Add the gradients of a share of the loss; the ranks' are added up, not averaged.

        Args:
            share: This rank's share.
            last: Whether it is the last one before the step.
        """
        ...

    def apply(self, finite: Tensor, rate: float) -> Applied:
        """Clip the gradients, take the step if all is finite in all ranks, and forget the gradients.

        Args:
            finite: Whether this rank's losses are.
            rate: The learning rate.
        """
        ...

    def state(self) -> Iterator[tuple[str, Any]]:
        """Yield the state by paths below "optimizer", gathered one at a time; the layout is torch's."""
        ...

    def begin_load(self, plain: Mapping[str, Any]) -> None:
        """Load the parts of a state other than tensors, by paths."""
        ...

    def take(self, path: str, whole: Tensor) -> None:
        """Take up a tensor of a state that all ranks have whole."""
        ...

    def end_load(self) -> None:
        """All of it was given."""
        ...

    def move(self, parts: Sequence[str], device: torch.device) -> None:
        """Bring the state ("optimizer") and the gradients ("gradients") to a device's memory."""
        ...

    def pieces(self) -> dict[str, Tensor]:
        """Return this rank's pieces of the state by paths, made if there were none yet: the optimizer's own."""
        ...

    def plain(self) -> dict[str, Any]:
        """Return the parts of the state other than tensors, by paths."""
        ...

    def pieces_read(self) -> None:
        """Resume from the weights' pieces and those that `pieces` returned: their contents were loaded."""
        ...


def by_paths(
    state: Iterable[tuple[int, str, Any]], param_groups: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[str, Any]]:
    """Yield an optimizer's state by paths, in the layout of torch's own `state_dict`.

    Args:
        state: Numbers of parameters, keys and what the state holds under them.
        param_groups: The optimizer's groups.
    """
    empty = True
    for number, key, content in state:
        yield path_of(number, key), content
        empty = False
    if empty:
        yield _STATE, {}
    yield _GROUPS, param_groups


def path_of(number: int, key: str) -> str:
    """Return the path of what the state holds of a parameter."""
    return f"{_STATE}\t#{number}\t{key}"


def place_of(path: str) -> tuple[int, str]:
    """Return the number of a parameter and the key that a path leads to."""
    _, _, number, key = path.split("\t")
    return int(number.removeprefix("#")), key


def plain_state(param_groups: Sequence[Mapping[str, Any]], *, stateless: bool) -> dict[str, Any]:
    """Return the parts of the state other than tensors, by paths.

    Args:
        param_groups: The optimizer's groups.
        stateless: Whether the state has no tensors.
    """
    return {_GROUPS: param_groups} | ({_STATE: {}} if stateless else {})


def checked_groups(plain: Mapping[str, Any], parameters: int) -> list[dict[str, Any]]:
    """Return the groups of a saved state.

    Args:
        plain: Its parts other than tensors, by paths.
        parameters: How many parameters are trained.

    Raises:
        ValueError: If it is of another optimizer.
    """
    groups: list[dict[str, Any]] = plain[_GROUPS]
    if [len(group["params"]) for group in groups] != [parameters]:
        raise ValueError("its optimizer is of another model")
    return groups


def what_broke(group: RankGroup, loss: Tensor, gradients: Mapping[str, Tensor]) -> str:
    """Say what of a step is not finite, the same in all ranks; they ask together.

    Args:
        group: The ranks.
        loss: Whether this rank's losses are finite.
        gradients: Whether what this rank has of each gradient is finite, by name of the weight.
    """
    loss_is, *gradients_are = group.all_true_each([loss, *gradients.values()])
    if not loss_is:
        return LOSS
    named = zip(gradients, gradients_are, strict=True)
    return gradient_named(next((name for name, finite in named if not finite), None))
