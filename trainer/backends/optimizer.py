"""The optimizer, its learning rate and the steps that it leaves out; its state over ranks, by names of checkpoints."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from rollgym.trainer.backends.rank_group import RankGroup
from rollgym.trainer.config.optimizer import OptimizerSettings
from rollgym.trainer.core.errors import RunError


@dataclass(frozen=True, slots=True)
class Schedule:
    """Learning rate by step: linear warm-up, then constant, linear or cosine to zero.

    Attributes:
        peak: The rate after the warm-up.
        warmup_steps: Steps of the warm-up.
        total_steps: Steps of the run, where a decaying schedule ends.
        kind: "constant", "linear" or "cosine".
    """

    peak: float
    warmup_steps: int
    total_steps: int
    kind: str

    def rate(self, step: int) -> float:
        """Return the rate of step `step`, counted from 0."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        progress = min(1.0, (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps))
        if self.kind == "linear":
            return self.peak * (1.0 - progress)
        if self.kind == "cosine":
            return self.peak * 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.peak


def make_optimizer(
    settings: OptimizerSettings, parameters: Iterable[torch.Tensor], rate: float
) -> torch.optim.Optimizer:
    """Return the optimizer of some parameters.

    Args:
        settings: Which one, and its numbers.
        parameters: What it steps.
        rate: Learning rate of the first step.
    """
    parameters = list(parameters)
    if settings.fused == "auto" and all(each.device.type != "cpu" for each in parameters):
        try:
            return _made(settings, parameters, rate, fused=True)
        except RuntimeError as error:  # of devices that have no such kernel
            if "fused" not in str(error):
                raise
    return _made(settings, parameters, rate, fused=settings.fused is True)


def _made(
    settings: OptimizerSettings, parameters: list[torch.Tensor], rate: float, *, fused: bool
) -> torch.optim.Optimizer:
    kernel = fused or None  # None lets torch choose among the others
    if settings.kind == "sgd":
        return torch.optim.SGD(parameters, lr=rate, weight_decay=settings.weight_decay, fused=kernel)
    return torch.optim.AdamW(
        parameters,
        lr=rate,
        betas=settings.betas,
        eps=settings.epsilon,
        weight_decay=settings.weight_decay,
        fused=kernel,
    )


LOSS_NOT_FINITE = "the loss is not finite"


def gradient_named(weight: str | None) -> str:
    """Say that a gradient is not finite.

    Args:
        weight: Whose; None if each one is, and their norm is not.
    """
    return (
        "the gradient's norm is not finite" if weight is None else f"the gradient of {weight} is not finite"
    )


class SkippedSteps:
    """Counts optimizer steps, and ends the run if too many in a row are left out.

    Args:
        what: What is trained, for the message.
        limit: How many steps in a row may be left out.
        say: Prints a message to the user; called at the first step that is left out, then ever more rarely.
    """

    def __init__(self, what: str, limit: int, say: Callable[[str], None] = lambda text: None) -> None:
        self._what = what
        self._limit = limit
        self._say = say
        self._in_a_row = 0
        self._left_out = 0

    def note(self, *, applied: bool, why: str = "") -> None:
        """Take note of a step.

        Args:
            applied: Whether it was taken.
            why: What was wrong, if not.

        Raises:
            RunError: If it is one too many.
        """
        self._in_a_row = 0 if applied else self._in_a_row + 1
        if applied:
            return
        why = why or "the loss or its gradient is not finite"
        self._left_out += 1
        if self._left_out & (self._left_out - 1) == 0:
            so_far = "" if self._left_out == 1 else f" ({self._left_out} so far)"
            self._say(f"an optimizer step of the {self._what} was left out{so_far}: {why}")
        if self._in_a_row > self._limit:
            raise RunError(
                f"{self._in_a_row} optimizer steps of the {self._what} in a row were left out "
                f"(optimizer.max_skipped_steps {self._limit}): {why}; no weights were harmed: look at the rewards, or "
                "lower optimizer.learning_rate"
            )


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
        return LOSS_NOT_FINITE
    named = zip(gradients, gradients_are, strict=True)
    return gradient_named(next((name for name, finite in named if not finite), None))
