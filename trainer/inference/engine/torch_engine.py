"""The embedded inference engine: plain torch, requests admitted and retired as they come.

Computation runs in one thread of its own, so the event loop stays free for environments. Between two decoding steps
the engine admits waiting requests, and applies new weights and cancellations. Each row has its keys and values in a
slot of its own; families for which that is not exact are decoded in one cache that rows join and leave.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, Self

from transformers import PreTrainedModel

from rollgym.trainer.config.inference import any_server
from rollgym.trainer.core.errors import RunError
from rollgym.trainer.inference.base import (
    GenerationRequest,
    GenerationResult,
    InferenceCounters,
    InferenceHealth,
    PauseMode,
    WeightSource,
    check_length,
)
from rollgym.trainer.inference.engine.decoding import ActiveBatch, Drawn, try_decoding
from rollgym.trainer.inference.engine.slot_batch import SlotBatch
from rollgym.trainer.inference.engine.slots import why_no_slots
from rollgym.trainer.inference.engine.structured import Grammars
from rollgym.trainer.inference.errors import StructuredOutputError
from rollgym.trainer.models.device import give_back
from rollgym.trainer.models.load import vocabulary_of
from rollgym.trainer.models.weights import load_weights, twin_of

_log = logging.getLogger(__name__)


class WeightsLeftOffError(RunError):
    """Raised by a source whose weights will not come to their end; the engine waits for others."""


class TorchEngine:
    """Samples replies from a model, on the device that it is on.

    Args:
        model: The policy.
        max_rows: Rows that are decoded at once; more requests wait.
        max_length: Longest row in tokens; a request that could pass it is refused.
        shares_weights: Whether replies are drawn with the model itself. A caller must then change its weights inside
            `standing_still` only. Otherwise the engine has a second model, with the same weights until it is given
            others.
        tokenizer: The policy's; without it no reply can be asked to look in some way (`SamplingParams.structured`).

    Raises:
        ConfigError: If the model keeps anything but keys and values of what it has read.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_rows: int,
        max_length: int,
        shares_weights: bool = False,
        tokenizer: Any = None,
    ) -> None:
        try_decoding(model)
        self._shares_weights = shares_weights
        self._model = model.eval() if shares_weights else twin_of(model)
        self._max_rows = max_rows
        self._max_length = max_length
        self._version = 0
        self._waiting: deque[tuple[GenerationRequest, asyncio.Future[GenerationResult]]] = deque()
        self._active: list[tuple[GenerationRequest, asyncio.Future[GenerationResult]]] = []
        self._grammars = None if tokenizer is None else Grammars(tokenizer, vocabulary_of(model))
        self._no_slots = why_no_slots(self._model, max_length)
        if self._no_slots is not None:
            _log.info("%s is decoded without slots: %s", type(model).__name__, self._no_slots)
        self._batch = self._new_batch(remembers=True)
        self._alone: ActiveBatch | SlotBatch | None = None
        self._updates: deque[tuple[WeightSource, int, asyncio.Future[None]]] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="torch-engine")
        self._loop_task: asyncio.Task[None] | None = None
        self._work = asyncio.Event()
        self._failure: Exception | None = None
        self._paused: PauseMode | None = None
        self._quiet = asyncio.Event()
        self._aborts: deque[tuple[set[str] | None, asyncio.Future[int]]] = deque()
        self._chores: deque[tuple[Callable[[], None], asyncio.Future[None]]] = deque()
        self._requests = 0
        self._prompt_tokens = 0
        self._tokens_generated = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def version(self) -> int:
        """The policy version that answers now."""
        return self._version

    @property
    def counters(self) -> InferenceCounters:
        """Totals of requests and tokens so far, and how many replies are in flight."""
        return InferenceCounters(
            self._requests, self._prompt_tokens, self._tokens_generated, running=len(self._active)
        )

    async def health(self) -> InferenceHealth:
        """Say whether it has failed."""
        if self._failure is not None:
            return InferenceHealth(False, f"the embedded engine has failed: {self._failure}")
        return InferenceHealth(True, f"the embedded engine, at version {self._version}")

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Return one reply; it shares batches with whatever else is running.

        Raises:
            ValueError: If the prompt is empty or leaves no room for the reply.
            StructuredOutputError: If what the reply must look like cannot be had.
        """
        await self._require_grammars([request])
        self._count(request)
        future: asyncio.Future[GenerationResult] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, future))
        self._wake()
        try:
            return await future
        except asyncio.CancelledError:
            self._work.set()  # so that it leaves its row at once, also where the engine stands still
            raise

    async def generate_together(self, requests: list[GenerationRequest]) -> list[GenerationResult]:
        """Return the replies of one batch that nothing else shares; equal calls give bitwise equal replies.

        More requests than the engine decodes at once are cut into batches of that size, in order.

        Raises:
            StructuredOutputError: If what one of them must look like cannot be had; none of them is drawn then.
        """
        await self._require_grammars(requests)
        for request in requests:
            self._count(request)
        loop = asyncio.get_running_loop()
        results: list[GenerationResult] = []
        for start in range(0, len(requests), self._max_rows):
            part = requests[start : start + self._max_rows]
            results += await loop.run_in_executor(self._thread, self._run_alone, part, self._version)
        self._tokens_generated += sum(len(result.token_ids) for result in results)
        return results

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        """End replies between two decoding steps, with what they have, and return how many."""
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._aborts.append((None if request_ids is None else set(request_ids), done))
        self._wake()
        return await done

    async def pause(self, mode: PauseMode) -> None:
        """Stop after the decoding step under way; with mode "wait", once no reply is under way any more.

        Replies stand still with their keys and values whatever the mode is: `sync` computes those again.
        """
        before, self._paused = self._paused, mode
        self._quiet.clear()
        try:
            self._wake()
            await self._quiet.wait()
        except BaseException:
            # A caller that is cancelled before the engine is quiet does not call `resume`.
            self._paused = before
            self._work.set()
            raise
        if self._failure is not None:
            raise RuntimeError("the inference engine has failed before") from self._failure

    async def resume(self) -> None:
        """Resume generating after a pause."""
        self._paused = None
        self._work.set()

    async def sync(self, source: WeightSource, version: int) -> None:
        """Take new weights between two decoding steps, one after the other.

        Replies in flight continue with the new weights: their keys and values are computed again, and each of their
        tokens names the version that drew it. The caller must not resume training before the weights are taken.

        Raises:
            WeightsLeftOffError: If the source says so: some are new then and some old, until others are brought whole.
        """
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._updates.append((source, version, future))
        self._wake()
        await future

    @asynccontextmanager
    async def standing_still(self, *, asleep: bool = False) -> AsyncIterator[None]:
        """Pause sampling inside the context if weights are shared; `sync` may still announce new ones.

        Args:
            asleep: Whether keys and values give their memory back meanwhile. Those of replies that are under way are
                computed again, with the weights that came or at the end.
        """
        if not self._shares_weights:
            yield
            return
        await self.pause("keep")
        try:
            if asleep:
                await self._between_steps(self._release)
            yield
        finally:
            try:
                if asleep:
                    await self._between_steps(self._take_up)
            finally:
                await self.resume()

    async def _between_steps(self, work: Callable[[], None]) -> None:
        """Do something in the engine's thread between two decoding steps, and wait for it."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._chores.append((work, done))
        self._wake()
        await done

    def _release(self) -> None:
        for batch in self._slot_batches():
            batch.release()
        give_back(self._model.device)

    def _take_up(self) -> None:
        for batch in self._slot_batches():
            if batch.is_released:
                batch.recompute()

    def _slot_batches(self) -> list[SlotBatch]:
        return [each for each in (self._batch, self._alone) if isinstance(each, SlotBatch)]

    async def close(self) -> None:
        """Stop; requests that still wait are cancelled."""
        if self._loop_task is not None:
            self._loop_task.cancel()
            await asyncio.gather(self._loop_task, return_exceptions=True)
            self._loop_task = None
        for _, future in [*self._active, *self._waiting]:
            future.cancel()
        for _, aborted in self._aborts:
            aborted.cancel()
        for *_, taken in self._updates:
            taken.cancel()
        for _, over in self._chores:
            over.cancel()
        self._quiet.set()
        if self._grammars is not None:
            self._grammars.close()
        self._thread.shutdown(wait=True)

    async def _require_grammars(self, requests: Sequence[GenerationRequest]) -> None:
        for request in requests:
            if request.sampling.structured is None:
                continue
            if self._grammars is None:
                raise StructuredOutputError(
                    "this engine has no tokenizer to hold structured outputs with: take inference.kind "
                    f"{any_server()}, or the embedded engine of a run without a cluster",
                    request.request_id,
                )
            try:
                await self._grammars.compile(request.sampling)
            except StructuredOutputError as error:
                error.request_id = request.request_id
                raise

    def _count(self, request: GenerationRequest) -> None:
        check_length(request, self._max_length, f"{self._max_length} (model.max_length)")
        self._requests += 1
        self._prompt_tokens += len(request.prompt_ids)

    def _wake(self) -> None:
        if self._failure is not None:
            # The loop has ended: the request would wait for ever.
            raise RuntimeError("the inference engine has failed before") from self._failure
        if self._loop_task is None:
            self._loop_task = asyncio.get_running_loop().create_task(self._serve())
        self._work.set()

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                self._work.clear()  # before anything is looked at: what comes from here on is seen in the next turn
                self._drop_cancelled()
                self._abort()
                while self._updates:
                    source, version, done = self._updates[0]
                    left_off = await loop.run_in_executor(self._thread, self._take_weights, source)
                    self._updates.popleft()
                    self._version = version
                    if left_off is not None and not done.done():
                        done.set_exception(left_off)
                    elif not done.done():
                        done.set_result(None)
                while self._chores:
                    chore, over = self._chores[0]
                    await loop.run_in_executor(self._thread, chore)
                    self._chores.popleft()
                    if not over.done():
                        over.set_result(None)
                if self._stands_still():
                    self._quiet.set()
                    await self._work.wait()
                    continue
                admitted = self._admissible()
                if admitted or self._active:
                    rows = len(self._active)
                    finished = await loop.run_in_executor(
                        self._thread, self._batch.advance, admitted, self._version
                    )
                    self._tokens_generated += rows
                    self._tell()
                    self._answer(finished)
                else:
                    await self._work.wait()
        except Exception as error:
            # The engine is broken: requests that wait must fail with this error rather than wait for ever.
            self._failure = error
            self._quiet.set()
            asked: list[asyncio.Future[Any]] = [future for _, future in [*self._active, *self._waiting]]
            asked += [done for *_, done in self._updates]
            asked += [over for _, over in self._chores]
            asked += [aborted for _, aborted in self._aborts]
            for future in asked:
                if not future.done():
                    future.set_exception(error)
            raise

    def _stands_still(self) -> bool:
        return self._paused is not None and not (self._paused == "wait" and self._active)

    def _admissible(self) -> list[GenerationRequest]:
        admitted: list[GenerationRequest] = []
        while self._paused is None and self._waiting and len(self._active) < self._max_rows:
            request, future = self._waiting.popleft()
            if not future.done():
                admitted.append(request)
                self._active.append((request, future))
        return admitted

    def _tell(self) -> None:
        """Schedule the requests' callbacks with the drawn tokens: an error of a callback does not reach the engine."""
        loop = asyncio.get_running_loop()
        for (request, future), token in zip(self._active, self._batch.drawn, strict=True):
            if request.on_tokens is not None and not future.done():
                loop.call_soon(request.on_tokens, [token])

    def _answer(self, finished: Sequence[tuple[int, Drawn]]) -> None:
        for row, result in finished:
            _, future = self._active[row]
            if future.done():
                continue
            if isinstance(result, StructuredOutputError):
                future.set_exception(result)
            else:
                future.set_result(result)
        gone = {row for row, _ in finished}
        self._active = [entry for row, entry in enumerate(self._active) if row not in gone]

    def _drop_cancelled(self) -> None:
        gone = [row for row, (_, future) in enumerate(self._active) if future.cancelled()]
        if gone:
            self._batch.remove(gone)
            self._active = [entry for entry in self._active if not entry[1].cancelled()]

    def _abort(self) -> None:
        while self._aborts:
            named, done = self._aborts[0]
            rows = [
                row
                for row, (request, _) in enumerate(self._active)
                if named is None or request.request_id in named
            ]
            self._answer(list(zip(rows, self._batch.take(rows), strict=True)))
            ended = len(rows)
            for entry in [each for each in self._waiting if named is None or each[0].request_id in named]:
                self._waiting.remove(entry)
                if not entry[1].done():
                    entry[1].set_result(GenerationResult([], [], [], "abort"))
                    ended += 1
            self._aborts.popleft()
            if not done.done():
                done.set_result(ended)

    def _take_weights(self, source: WeightSource) -> WeightsLeftOffError | None:
        """Load weights; a source that ends half way is an error of the update, not of the engine."""
        if not self._shares_weights:
            try:
                load_weights(self._model, source.parameters())
            except WeightsLeftOffError as error:
                return error
        elif next(iter(source.parameters()))[1].data_ptr() != next(self._model.parameters()).data_ptr():
            raise ValueError("the engine shares the weights of a model, and is given those of another")
        self._batch.recompute()
        if self._alone is not None:
            self._alone.recompute()
        return None

    def _new_batch(self, *, remembers: bool) -> ActiveBatch | SlotBatch:
        if self._no_slots is not None:
            return ActiveBatch(self._model, self._grammars)
        return SlotBatch(
            self._model, self._max_rows, self._max_length, grammars=self._grammars, remembers=remembers
        )

    def _run_alone(self, requests: list[GenerationRequest], version: int) -> list[GenerationResult]:
        # One that breaks is not used again.
        batch, self._alone = self._alone or self._new_batch(remembers=False), None
        indices = list(range(len(requests)))
        results: list[GenerationResult | None] = [None] * len(requests)
        admitted = requests
        while indices:
            finished = batch.advance(admitted, version)
            admitted = []
            gone = set()
            for row, result in finished:
                if isinstance(result, StructuredOutputError):
                    result.request_id = requests[indices[row]].request_id
                    raise result
                results[indices[row]] = result
                gone.add(row)
            indices = [index for row, index in enumerate(indices) if row not in gone]
        self._alone = batch
        return [result for result in results if result is not None]
