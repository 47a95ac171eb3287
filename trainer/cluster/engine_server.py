"""The embedded inference engine in a process of its own: the server in that process."""

import asyncio
import queue
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rollgym.trainer.core.errors import RunError
from rollgym.trainer.inference.base import (
    GenerationRequest,
    GenerationResult,
    InferenceCounters,
    InferenceHealth,
    PauseMode,
)
from rollgym.trainer.inference.engine.torch_engine import TorchEngine, WeightsLeftOffError

Tensors = Sequence[tuple[str, Tensor]]

_WEIGHTS_AT_ONCE = 2
"""Parts of the weights that wait for the engine while it loads those before."""


class EngineServer:
    """Answers the calls of `RemoteEngines` with an engine of this process.

    Args:
        build: Builds the model.
        max_rows: Rows that are decoded at once.
        max_length: Longest row in tokens.
        threads: Threads of torch's operators.
    """

    def __init__(
        self, build: Callable[[], PreTrainedModel], max_rows: int, max_length: int, threads: int
    ) -> None:
        torch.set_num_threads(threads)
        # The engine has weights of its own; the model that they are copied from is freed once the engine is built.
        self._engine = TorchEngine(build(), max_rows=max_rows, max_length=max_length)
        self._replies: dict[str, asyncio.Task[GenerationResult]] = {}
        self._arriving: _ArrivingWeights | None = None
        self._loading: asyncio.Task[None] | None = None

    async def ready(self) -> None:
        """Return once the engine accepts requests."""

    async def generate(self, request: GenerationRequest) -> tuple[GenerationResult, InferenceCounters]:
        """Return one reply, and what was done so far."""
        reply = self._replies[request.request_id] = asyncio.ensure_future(self._engine.generate(request))
        try:
            await asyncio.wait({reply})
            result = GenerationResult([], [], [], "abort") if reply.cancelled() else reply.result()
        finally:
            del self._replies[request.request_id]
        return result, self._engine.counters

    async def drop(self, request_id: str) -> None:
        """Cancel a reply whose caller no longer waits for it."""
        if (reply := self._replies.get(request_id)) is not None:
            reply.cancel()

    async def generate_together(
        self, requests: list[GenerationRequest]
    ) -> tuple[list[GenerationResult], InferenceCounters]:
        """Return the replies of one batch, and what was done so far."""
        return await self._engine.generate_together(requests), self._engine.counters

    async def abort(self, request_ids: Sequence[str] | None) -> int:
        """End replies with what they have."""
        return await self._engine.abort(request_ids)

    async def pause(self, mode: PauseMode) -> None:
        """Pause generation; `mode` decides the fate of running replies."""
        await self._engine.pause(mode)

    async def resume(self) -> None:
        """Resume generation after `pause`, for replies that it kept as well."""
        await self._engine.resume()

    async def health(self) -> InferenceHealth:
        """Return the engine's health, as its clients see it."""
        return await self._engine.health()

    async def begin_weights(self, version: int) -> None:
        """Announce weights, which come in parts. Others that came in part are left off."""
        await self.leave_off_weights()
        self._arriving = _ArrivingWeights()
        self._loading = asyncio.ensure_future(self._engine.sync(self._arriving, version))

    async def leave_off_weights(self) -> None:
        """Abort a partial transfer of weights whose sender has failed."""
        if self._arriving is not None and self._loading is not None and not self._loading.done():
            self._arriving.leave_off()
            await asyncio.wait({self._loading})
            self._loading.exception()

    async def take_weights(self, tensors: Tensors) -> None:
        """Accept the next part of the weights; return once there is room for more."""
        assert self._arriving is not None
        assert self._loading is not None
        arriving = self._arriving
        putting = asyncio.ensure_future(asyncio.to_thread(arriving.put, tensors))
        await asyncio.wait({putting, self._loading}, return_when=asyncio.FIRST_COMPLETED)
        if self._loading.done():
            arriving.drop()
            self._loading.result()
        await putting

    async def end_weights(self) -> None:
        """Mark the weights as complete; return once the engine has loaded them.

        Raises:
            ValueError: If they are not those of the model.
        """
        assert self._arriving is not None
        assert self._loading is not None
        await asyncio.to_thread(self._arriving.put, None)
        await self._loading


class _ArrivingWeights:
    """A source of weights that come in parts while they are read."""

    def __init__(self) -> None:
        self._parts: queue.Queue[Tensors | None] = queue.Queue(_WEIGHTS_AT_ONCE)
        self._dropped = False
        self._left_off = False

    def put(self, tensors: Tensors | None) -> None:
        """Pass a part to the reader; None marks the end. Blocks while the queue is full."""
        if not self._dropped:
            self._parts.put(tensors)

    def leave_off(self) -> None:
        """Tell the reader to stop waiting: no further parts will come."""
        self._left_off = True
        self.drop()
        self._parts.put(None)

    def drop(self) -> None:
        """Discard all parts and stop blocking: the reader has failed."""
        self._dropped = True
        while True:
            try:
                self._parts.get_nowait()
            except queue.Empty:
                return

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names and tensors as the parts arrive."""
        while (part := self._parts.get()) is not None:
            yield from part
        if self._left_off:
            raise WeightsLeftOffError("the weights were left off, and others come in their place")

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Raise: an engine receives weights by `parameters`."""
        raise RunError("weights of an engine come by the names of its own modules")

    def require_held(self) -> None:
        """Do nothing: the parts that arrive are copies."""

    async def folder(self) -> Path:
        """Raise: an engine receives weights by `parameters`."""
        raise RunError("an engine reads no folder of weights")
