"""Decoding steps as graphs of a device: each shape is recorded the first time, and from then on launched as a whole."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Recording:
    graph: Any
    tokens: Tensor
    logits: Tensor


def can_record(device: torch.device) -> bool:
    """Whether torch records what is launched on a device, as it does with CUDA and ROCm."""
    return hasattr(torch.get_device_module(device), "CUDAGraph")


class CapturedSteps:
    """Decoding steps captured as graphs.

    Args:
        step: Computes logits `[rows, vocabulary]` of tokens on the device and a width. It must be repeatable, and wait
            for nothing.
        device: One for which `can_record` holds.
    """

    def __init__(self, step: Callable[[Tensor, int], Tensor], device: torch.device) -> None:
        self._step = step
        self._device = device
        self._torch: Any = torch.get_device_module(device)
        self._recordings: dict[tuple[int, int], _Recording] = {}
        self._pool: Any = None  # torch has no public name for what it is
        self._possible = True

    def __call__(self, tokens: Tensor, width: int) -> Tensor:
        """Return the logits of a step; the next call writes over them.

        Args:
            tokens: What the step is given, `[3, rows]`, on the host.
            width: Columns that it reads.
        """
        key = tokens.shape[1], width
        if key not in self._recordings and self._possible:
            self._record(key, tokens)
        recording = self._recordings.get(key)
        if recording is None:
            return self._step(tokens.to(self._device), width)
        recording.tokens.copy_(tokens)
        recording.graph.replay()
        return recording.logits

    def clear(self) -> None:
        """Forget what was recorded: tensors that it reads are elsewhere now."""
        self._recordings.clear()
        self._pool = None

    def _record(self, key: tuple[int, int], tokens: Tensor) -> None:
        given = tokens.to(self._device)
        try:
            logits = self._warmed_up(given, key[1])
            self._recordings[key] = _Recording(self._graph(given, key[1], logits), given, logits)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self._possible = False
            reason = " ".join(str(error).split())[:200]
            _log.warning(
                "decoding steps are launched kernel by kernel: a graph cannot hold them (%s)", reason
            )

    def _warmed_up(self, given: Tensor, width: int) -> Tensor:
        """Run a step before it is recorded, so that libraries make their plans, and return room for its logits."""
        aside, current = self._torch.Stream(self._device), self._torch.current_stream(self._device)
        aside.wait_stream(current)
        with self._torch.stream(aside):
            self._step(given, width)
            logits = self._step(given, width)
        current.wait_stream(aside)
        return self._room(logits)

    def _room(self, logits: Tensor) -> Tensor:
        # Recordings share room for their logits: one is read before the next is launched.
        largest = max(self._recordings.values(), key=lambda each: len(each.logits), default=None)
        if largest is not None and len(largest.logits) >= len(logits):
            return largest.logits[: len(logits)]
        return torch.empty_like(logits)

    def _graph(self, given: Tensor, width: int, logits: Tensor) -> Any:
        graph = self._torch.CUDAGraph()
        # Another thread may train at the same time: in this mode its CUDA calls do not disturb the capture.
        with self._torch.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits.copy_(self._step(given, width))
        self._pool = graph.pool()
        return graph
