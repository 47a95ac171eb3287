"""Makes generation reproducible: all running episodes ask, then one batch in fixed order answers.

Floating-point sums depend on a batch's composition. In deterministic mode a batch therefore holds one request of
every running episode, sorted by (group, member, turn), so two runs make equal batches regardless of the environments'
latencies. If a server allows fewer sessions than there are episodes, only that many run at one time; whenever one
ends, the next in line starts, and the batch waits for it.
"""

import asyncio
from collections import deque

from rollgym.trainer.inference.base import (
    GenerationRequest,
    GenerationResult,
    InferenceClient,
)
from rollgym.trainer.inference.errors import StructuredOutputError
from rollgym.trainer.inference.forwarding import ForwardingClient
from rollgym.trainer.rollout.slots import EpisodeSlots
from rollgym.trainer.tasks.task import Task

_Answered = GenerationResult | StructuredOutputError


class _Batch:
    """The requests of one batch while it fills, and the task that answers it once it is full."""

    def __init__(self) -> None:
        self.requests: list[GenerationRequest] = []
        self.full = asyncio.Event()
        self.answer: asyncio.Task[dict[str, _Answered]] | None = None


class DeterministicBatcher(ForwardingClient, EpisodeSlots):
    """An inference client that waits until every running episode has asked.

    Episodes must call `enter` as soon as they are known, wait for `start` before they take a session, and call
    `leave` when they end, however they end.

    Args:
        client: The client that samples.
        places: Episodes that may run at one time; None for no limit.
    """

    def __init__(self, client: InferenceClient, places: int | None = None) -> None:
        super().__init__(client)
        self._places = places
        self._entered = 0
        self._started = 0
        self._line: deque[asyncio.Future[None]] = deque()
        self._batch = _Batch()

    def enter(self) -> None:
        """Count an episode that will run."""
        self._entered += 1

    async def start(self, task: Task, member: int) -> None:
        """Wait for a place, in line: those that wait start in the order in which they came."""
        if self._places is None or self._started < self._places:
            self._started += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._line.remove(turn)
            else:
                self._free_place()
            raise

    def leave(self, task: Task | None) -> None:
        """An episode ended; the others may have been waiting for it, or for its place."""
        self._entered -= 1
        if task is not None:
            self._free_place()
        self._send_if_full()

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Wait for the batch and return this request's reply."""
        batch = self._batch
        batch.requests.append(request)
        self._send_if_full()
        try:
            await batch.full.wait()
        except asyncio.CancelledError:
            if request in batch.requests and batch.answer is None:
                batch.requests.remove(request)
            raise
        assert batch.answer is not None
        # One cancelled episode must not take the others' answers with it.
        result = (await asyncio.shield(batch.answer))[request.request_id]
        if isinstance(result, StructuredOutputError):
            raise result
        return result

    def _free_place(self) -> None:
        while self._line:
            turn = self._line.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._started -= 1

    @property
    def _running(self) -> int:
        """How many episodes run, or will as soon as they have taken the places that are free."""
        return self._entered if self._places is None else min(self._entered, self._places)

    def _send_if_full(self) -> None:
        batch = self._batch
        if batch.requests and len(batch.requests) >= self._running:
            self._batch = _Batch()
            batch.answer = asyncio.get_running_loop().create_task(self._answer(batch.requests))
            batch.full.set()

    async def _answer(self, requests: list[GenerationRequest]) -> dict[str, _Answered]:
        """Return each request's result. An impossible structured output fails its own request only."""
        ordered = sorted(requests, key=lambda request: request.order)
        answered: dict[str, _Answered] = {}
        while ordered:
            try:
                results = await self._client.generate_together(ordered)
            except StructuredOutputError as error:
                left = [request for request in ordered if request.request_id != error.request_id]
                if len(left) == len(ordered):
                    raise
                answered[error.request_id], ordered = error, left
            else:
                return answered | {
                    request.request_id: result for request, result in zip(ordered, results, strict=True)
                }
        return answered
