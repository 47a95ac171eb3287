"""Arguments of the user's functions: they may read them, and changes to them must not affect other readers."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from rollgym.trainer.algorithms.batch import SurrogateInputs
from rollgym.trainer.algorithms.losses import SurrogateLoss
from rollgym.trainer.core.plugins import Plugin, load_plugin


@contextmanager
def left_alone(plugin: Plugin, shown: Any) -> Iterator[None]:
    """Hold a function to leave the tensors that it is shown as they are.

    Copies would cost memory in every micro-batch; torch counts changes in place.

    Args:
        plugin: The function, which is called inside.
        shown: A dataclass with tensors among its fields.

    Raises:
        PluginError: If one was changed.
    """
    named = {each.name: getattr(shown, each.name) for each in fields(shown)}
    tensors = {name: value for name, value in named.items() if isinstance(value, Tensor)}
    before = {name: tensor._version for name, tensor in tensors.items()}
    yield
    changed = [name for name, tensor in tensors.items() if tensor._version != before[name]]
    if changed:
        raise plugin.broken(
            f"has changed {', '.join(changed)} in place, which others read: work on a copy ({changed[0]}.clone())"
        )


def losses_of(path: str, inputs: SurrogateInputs) -> SurrogateLoss:
    """Return what a loss of the user's makes of a micro-batch.

    Raises:
        PluginError: If it raises, or does not return a loss for each token.
    """
    plugin = load_plugin(path, "algorithm.surrogate.function")
    with left_alone(plugin, inputs):
        loss = plugin(inputs)
    if not isinstance(loss, Tensor) or loss.shape != inputs.mask.shape or not loss.is_floating_point():
        raise plugin.broken("must return a tensor with the loss of each token, [rows, tokens]")
    if inputs.logprobs.requires_grad and not loss.requires_grad:
        raise plugin.broken(
            "must return a loss with a gradient: compute it from logprobs or log_ratio, outside of torch.no_grad and "
            "without detach"
        )
    return SurrogateLoss(loss, torch.zeros_like(inputs.mask))
