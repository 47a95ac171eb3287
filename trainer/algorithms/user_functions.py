"""Arguments of the user's functions: they may read them, and changes to them must not affect other readers."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from torch import Tensor

from rollgym.trainer.core.plugins import Plugin


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
