"""The embedded inference engine in processes of the role `actor_inference`, as inference clients of the driver."""

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from rollgym.trainer.backends.transport import pack, unpack
from rollgym.trainer.cluster.process import KeptProcess, RoleProcess
from rollgym.trainer.core.errors import RoleDiedError
from rollgym.trainer.inference.base import (
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

    An episode's requests go to one engine; a new episode goes to the one with the fewest replies in flight. An engine
    that dies is started again and given the weights that were brought last, which are kept here for that; replies that
    it owed are drawn again.

    Args:
        engines: The processes; each has an `EngineServer`.
    """

    def __init__(self, engines: Sequence[KeptProcess]) -> None:
        self._engines = list(engines)
        self._running = [0] * len(self._engines)
        self._counters = [InferenceCounters()] * len(self._engines)
        self._before = [InferenceCounters()] * len(self._engines)
        self._resubmitted = 0
        self._homes: dict[str, int] = {}
        self._version = 0
        self._weights: list[bytes] = []
        self._bringing = asyncio.Lock()
        self._paused: PauseMode | None = None
        self._owed: dict[str, asyncio.Future[None]] = {}
        for number, engine in enumerate(self._engines):
            engine.bring = partial(self._bring, number)

    @property
    def version(self) -> int:
        """The policy version that answers now."""
        return self._version

    @property
    def counters(self) -> InferenceCounters:
        """Return the counters of all engines, as reported with their replies."""
        each = [*self._before, *self._counters]
        return InferenceCounters(
            sum(counters.requests for counters in each),
            sum(counters.prompt_tokens for counters in each),
            sum(counters.tokens_generated for counters in each),
            resubmitted=self._resubmitted,
            running=sum(self._running),
        )

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Return one reply.

        Raises:
            ValueError: If the prompt is empty or leaves no room for the reply.
            RoleLostError: If the engine's process died too often.
        """
        request = replace(request, on_tokens=None)  # the listener is in this process
        while True:
            number = self._engine_for(request.session_key)
            self._running[number] += 1
            try:
                if await self._ended_while_waiting(number, request.request_id):
                    return GenerationResult([], [], [], "abort")
                return await self._drawn(number, request)
            except RoleDiedError as died:
                self._resubmitted += 1
                if died.with_its_node:
                    raise
            finally:
                self._running[number] -= 1

    async def generate_together(self, requests: list[GenerationRequest]) -> list[GenerationResult]:
        """Return the replies of one batch that nothing else shares, which the first engine computes."""
        while True:
            try:
                replies: list[GenerationResult]
                replies, self._counters[0] = await self._engines[0].call("generate_together", requests)
                return replies
            except RoleDiedError as died:
                self._resubmitted += len(requests)
                if died.with_its_node:
                    raise

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        """End replies with what they have, and return how many."""
        owed = [name for name in self._owed if request_ids is None or name in request_ids]
        for name in owed:
            self._owed.pop(name).set_result(None)
        return len(owed) + sum(await self._everywhere("abort", request_ids))

    async def pause(self, mode: PauseMode) -> None:
        """Pause generation in all engines; `mode` decides the fate of running replies."""
        self._paused = mode
        await self._everywhere("pause", mode)

    async def resume(self) -> None:
        """Resume generation in all engines after `pause`."""
        self._paused = None
        await self._everywhere("resume")

    async def sync(self, source: WeightSource, version: int) -> None:
        """Send weights to all engines, a part at a time; replies in flight continue with them.

        An engine that dies meanwhile receives them after its restart.
        """
        async with self._bringing:
            there = {number: await each.living() for number, each in enumerate(self._engines) if each.there}
            weights: list[bytes] = []

            async def send(method: str, *arguments: Any) -> None:
                weights.append(await asyncio.to_thread(pack, (method, arguments)))
                await self._told(there, weights[-1])

            try:
                await send("begin_weights", version)
                parts = _parts(source.parameters())
                while (part := await asyncio.to_thread(next, parts, None)) is not None:
                    await send("take_weights", part)
                await send("end_weights")
            except BaseException:
                for process in there.values():  # they would wait for the rest, and answer nothing meanwhile
                    process.call(pack(("leave_off_weights", ())))
                raise
            self._weights, self._version = weights, version

    async def health(self) -> InferenceHealth:
        """Return the health of the first engine that is not ready, else the number of engines."""
        away = sum(not engine.there for engine in self._engines)
        if away:
            return InferenceHealth(False, f"{away} of {len(self._engines)} engines are started again")
        for health in await self._everywhere("health"):
            if not health.ready:
                return InferenceHealth(False, health.detail)
        return InferenceHealth(True, f"{len(self._engines)} engines of their own, at version {self._version}")

    async def start_anew(self) -> None:
        """Abort all replies in flight, and resume engines that an ended attempt left paused: another attempt begins."""
        await self.abort()
        await self.resume()
        self._homes.clear()

    async def close(self) -> None:
        """End the processes of the engines."""
        await asyncio.gather(*(engine.end() for engine in self._engines))

    async def _drawn(self, number: int, request: GenerationRequest) -> GenerationResult:
        """Sample a reply in one of the engines."""
        engine = self._engines[number]
        process = await engine.living()
        try:
            drawn = await engine.answer(process, pack(("generate", (request,))))
        except asyncio.CancelledError:
            process.call(pack(("drop", (request.request_id,))))
            raise
        reply: GenerationResult
        reply, self._counters[number] = drawn
        return reply

    async def _ended_while_waiting(self, number: int, request_id: str) -> bool:
        """Wait until an engine takes requests; whether this one was asked to end meanwhile."""
        if self._engines[number].there:
            return False
        ended = self._owed[request_id] = asyncio.get_running_loop().create_future()
        living = asyncio.ensure_future(self._engines[number].living())
        try:
            await asyncio.wait({ended, living}, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                return True
            living.result()
            return False
        finally:
            self._owed.pop(request_id, None)
            living.cancel()
            await asyncio.gather(living, return_exceptions=True)

    async def _bring(self, number: int, process: RoleProcess) -> None:
        """Make an engine that was started again what the others are."""
        async with self._bringing:
            self._before[number] = _sum(self._before[number], self._counters[number])
            self._counters[number] = InferenceCounters()
            for data in self._weights:
                await answer_of(process.call(data))
            told: PauseMode | None = None
            while told != self._paused:
                told = self._paused
                asked = ("resume", ()) if told is None else ("pause", (told,))
                await answer_of(process.call(pack(asked)))

    def _engine_for(self, session_key: str) -> int:
        home = self._homes.get(session_key)
        there = [number for number, engine in enumerate(self._engines) if engine.there]
        if home is not None and (home in there or not there):
            return home
        number = min(there or range(len(self._engines)), key=self._running.__getitem__)
        if session_key:
            self._homes[session_key] = number
            if len(self._homes) > _HOMES:
                self._homes.pop(next(iter(self._homes)))
        return number

    async def _everywhere(self, method: str, *arguments: Any) -> list[Any]:
        there = {number: await each.living() for number, each in enumerate(self._engines) if each.there}
        return await self._told(there, await asyncio.to_thread(pack, (method, arguments)))

    async def _told(self, there: dict[int, RoleProcess], data: bytes) -> list[Any]:
        """Call engines, and return the answers of those that live; those that do not are left out from then on."""
        asked = [self._engines[number].answer(process, data) for number, process in there.items()]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        for number, answer in zip(list(there), answers, strict=True):
            if isinstance(answer, RoleDiedError):
                del there[number]
            elif isinstance(answer, BaseException):
                raise answer
        return [answer for answer in answers if not isinstance(answer, BaseException)]


def _sum(one: InferenceCounters, other: InferenceCounters) -> InferenceCounters:
    return InferenceCounters(
        one.requests + other.requests,
        one.prompt_tokens + other.prompt_tokens,
        one.tokens_generated + other.tokens_generated,
    )


async def answer_of(called: "Future[bytes]") -> Any:
    """Return the result of a call to an engine's process.

    Raises:
        RoleDiedError: If the process has died.
        TrainerError: The error that the call raised in the process.
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
