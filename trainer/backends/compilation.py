"""Layers that torch compiles for training steps (torch.compile), one at a time: a model's layers share their code."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from trainer.backends.gradient_checkpointing import bodies_of, layers_of
from trainer.core.errors import ConfigError


class CompiledLayers:
    """Has training steps run compiled layers; whoever samples with the same weights runs them as they are.

    Rows are of many lengths: layers are compiled for any length, and once more where rows share what they begin with.

    Args:
        model: What is trained; nothing wraps it yet.
        backend: What compiles, by torch's name, such as `inductor`; None leaves the layers as they are.

    Raises:
        ConfigError: If torch has no such backend.
    """

    def __init__(self, model: nn.Module, backend: str | None) -> None:
        self._layers: list[nn.Module] = []
        if backend is None:
            return
        if backend not in torch.compiler.list_backends(exclude_tags=()):
            known = ", ".join(torch.compiler.list_backends())
            raise ConfigError(f"model.compile {backend}: torch has no such backend; it has {known}")
        self._layers = [layer for body in bodies_of(model) for layer in layers_of(body)]
        for layer in self._layers:
            layer.compile(backend=backend, dynamic=True)
        self._compiled = [layer._compiled_call_impl for layer in self._layers]
        self._use(compiled=False)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Run them while inside."""
        self._use(compiled=True)
        try:
            yield
        finally:
            self._use(compiled=False)

    def _use(self, *, compiled: bool) -> None:
        for number, layer in enumerate(self._layers):
            layer._compiled_call_impl = self._compiled[number] if compiled else None
