"""A backend's weights as inference clients take them."""

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from trainer.backends.base import TrainBackend


class BackendWeights:
    """The weights that a backend holds now.

    Args:
        backend: Whose they are.
    """

    def __init__(self, backend: TrainBackend) -> None:
        self._backend = backend

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the backend's own tensors by name."""
        return self._backend.export()

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield them by the names of the backend's modules."""
        return self._backend.parameters()

    async def folder(self) -> Path:
        """Return a directory with these weights."""
        raise NotImplementedError("weights are not written to disk yet")
