"""The embedded inference engine in processes of the role `actor_inference`, as inference clients of the driver."""

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from torch import Tensor

from trainer.backends.transport import pack, unpack
from trainer.cluster.process import RoleProcess
from trainer.inference.base import (
    GenerationRequest,
    GenerationResult,
    InferenceCounters,
    InferenceHealth,
    PauseMode,
    WeightSource,
)

_PART_BYTES = 2**26
"""Weights that one call carries, unless a single tensor is larger."""
_HOMES = 100_000
"""Episodes whose engine is remembered."""


class RemoteEngines:
    """Engines in processes of their own, all of which have the same weights. An `InferenceClient`.

    An episode's requests go to one engine; a new episode goes to the one with the fewest replies under way.

    Args:
        processes: The processes; each has an `EngineServer`.
    """

    def __init__(self, processes: Sequence[RoleProcess]) -> None:
        self._processes = list(processes)
        self._running = [0] * len(self._processes)
        self._counters = [InferenceCounters()] * len(self._processes)
        self._homes: dict[str, int] = {}
        self._version = 0

    @property
    def version(self) -> int:
        """The policy version that answers now."""
        return self._version

    @property
    def counters(self) -> InferenceCounters:
        """What all engines have done, as far as their replies have said it."""
        return InferenceCounters(
            sum(each.requests for each in self._counters),
            sum(each.prompt_tokens for each in self._counters),
            sum(each.tokens_generated for each in self._counters),
            running=sum(self._running),
        )

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Return one reply.

        Raises:
            ValueError: If the prompt is empty or leaves no room for the reply.
            RoleDiedError: If the engine's process is gone.
        """
        number = self._engine_for(request.session_key)
        self._running[number] += 1
        try:
            result, self._counters[number] = await self._call(number, "generate", request)
        except asyncio.CancelledError:
            self._processes[number].call(pack(("drop", (request.request_id,))))
            raise
        finally:
            self._running[number] -= 1
        reply: GenerationResult = result
        return reply

    async def generate_together(self, requests: list[GenerationRequest]) -> list[GenerationResult]:
        """Return the replies of one batch that nothing else shares, which the first engine computes."""
        results, self._counters[0] = await self._call(0, "generate_together", requests)
        replies: list[GenerationResult] = results
        return replies

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        """End replies with what they have, and return how many."""
        return sum(await self._everywhere("abort", request_ids))

    async def pause(self, mode: PauseMode) -> None:
        """Stop generating."""
        await self._everywhere("pause", mode)

    async def resume(self) -> None:
        """Go on."""
        await self._everywhere("resume")

    async def sync(self, source: WeightSource, version: int) -> None:
        """Bring weights to all engines, a part at a time; replies under way go on with them."""
        await self._everywhere("begin_weights", version)
        parts = _parts(source.parameters())
        while (part := await asyncio.to_thread(next, parts, None)) is not None:
            await self._everywhere("take_weights", part)
        await self._everywhere("end_weights")
        self._version = version

    async def health(self) -> InferenceHealth:
        """Say how the first engine that is not well is, or how many there are."""
        for health in await self._everywhere("health"):
            if not health.ready:
                return InferenceHealth(False, health.detail)
        return InferenceHealth(
            True, f"{len(self._processes)} engines of their own, at version {self._version}"
        )

    async def close(self) -> None:
        """End the processes."""
        await asyncio.gather(*(asyncio.to_thread(process.end) for process in self._processes))

    def _engine_for(self, session_key: str) -> int:
        if session_key not in self._homes:
            number = min(range(len(self._processes)), key=self._running.__getitem__)
            if not session_key:
                return number
            self._homes[session_key] = number
            if len(self._homes) > _HOMES:
                self._homes.pop(next(iter(self._homes)))
        return self._homes[session_key]

    async def _everywhere(self, method: str, *arguments: Any) -> list[Any]:
        data = await asyncio.to_thread(pack, (method, arguments))
        return await asyncio.gather(*(answer_of(process.call(data)) for process in self._processes))

    async def _call(self, number: int, method: str, *arguments: Any) -> Any:
        return await answer_of(self._processes[number].call(pack((method, arguments))))


async def answer_of(called: "Future[bytes]") -> Any:
    """Return what a call came to.

    Raises:
        RoleDiedError: If the process is no more.
        TrainerError: What the call raised there.
    """
    done, content = unpack(await asyncio.wrap_future(called))
    if not done:
        raise content
    return content


def _parts(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    """Cut weights into parts of about `_PART_BYTES`, in the host's memory."""
    held: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in tensors:
        held.append((name, tensor.detach().cpu()))
        size += tensor.numel() * tensor.element_size()
        if size >= _PART_BYTES:
            yield held
            held, size = [], 0
    if held:
        yield held
