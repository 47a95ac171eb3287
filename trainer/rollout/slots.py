"""Which episodes may run at one time, the oldest group first, and batches that hold a request of each of them.

Floating-point sums depend on a batch's composition. In deterministic mode a batch therefore holds one request of
every running episode, sorted by (group, member, turn), so two runs make equal batches regardless of the environments'
latencies. If a server allows fewer sessions than there are episodes, only that many run at one time; whenever one
ends, the next in line starts, and the batch waits for it.
"""

import asyncio
import heapq
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from rollgym.trainer.inference.base import (
    GenerationRequest,
    GenerationResult,
    InferenceClient,
)
from rollgym.trainer.inference.errors import StructuredOutputError
from rollgym.trainer.inference.forwarding import ForwardingClient
from rollgym.trainer.tasks.task import Task


class EpisodeSlots:
    """Notified when episodes start and end. This base class lets every episode start at once."""

    def enter(self) -> None:
        """Note that an episode will run."""

    async def start(self, task: Task, member: int) -> None:
        """Wait until the episode may start; it acquires resources, such as a session, only afterwards."""

    def leave(self, task: Task | None) -> None:
        """Note that it ended. `task` is what it started with; None if it was cancelled before it started."""


class Slot:
    """One episode's slot: entered at creation, left exactly once, however the episode ends.

    A task that is cancelled before its first turn runs none of its own code; the holder of the slot then leaves it.

    Args:
        slots: The slots that it counts in.
    """

    def __init__(self, slots: EpisodeSlots) -> None:
        self._slots = slots
        self._task: Task | None = None
        self._left = False
        slots.enter()

    async def start(self, task: Task, member: int) -> None:
        """Wait until the episode may start."""
        await self._slots.start(task, member)
        self._task = task

    def leave(self) -> None:
        """Note that it ended; only the first call counts."""
        if not self._left:
            self._left = True
            self._slots.leave(self._task)


@dataclass(order=True, slots=True)
class _Waiting:
    """One that waits; earlier groups first, then in order of arrival."""

    place: tuple[int, int]
    number: int
    granted: asyncio.Future[None] = field(compare=False)


class BoundedSlots(EpisodeSlots):
    """A limited number of slots for episodes, in total and for each environment.

    An episode that waits for a slot of its environment takes none of those that others could use.

    Args:
        total: Episodes that may run at one time; None for no limit.
        of_environment: The same by environment id, for those that are costlier than others.
    """

    def __init__(self, total: int | None, of_environment: Mapping[str, int] | None = None) -> None:
        self._total = total
        self._of_environment = dict(of_environment or {})
        self._started = 0
        self._running: Counter[str] = Counter()
        self._waiting: dict[str, list[_Waiting]] = {}
        self._numbers = 0

    async def start(self, task: Task, member: int) -> None:
        """Wait for a slot; of those that wait, members of the oldest group start first."""
        env_id = task.env_id
        if self._has_room(env_id) and not self._waiting.get(env_id):
            self._take(env_id)
            return
        self._numbers += 1
        entry = _Waiting((task.index, member), self._numbers, asyncio.get_running_loop().create_future())
        heapq.heappush(self._waiting.setdefault(env_id, []), entry)
        try:
            await entry.granted
        except asyncio.CancelledError:
            if not entry.granted.cancelled():
                self._free(env_id)  # it was granted at that moment
            raise

    def leave(self, task: Task | None) -> None:
        """Free the slot for a waiting episode."""
        if task is not None:
            self._free(task.env_id)

    def _take(self, env_id: str) -> None:
        self._started += 1
        self._running[env_id] += 1

    def _free(self, env_id: str) -> None:
        self._started -= 1
        self._running[env_id] -= 1
        while (head := self._next_waiting()) is not None:
            key, entry = head
            heapq.heappop(self._waiting[key])
            self._take(key)
            entry.granted.set_result(None)

    def _next_waiting(self) -> tuple[str, _Waiting] | None:
        """Return the oldest of those that could start now."""
        found: tuple[str, _Waiting] | None = None
        for env_id, queue in list(self._waiting.items()):
            while queue and queue[0].granted.done():
                heapq.heappop(queue)
            if not queue:
                del self._waiting[env_id]
            elif self._has_room(env_id) and (found is None or queue[0] < found[1]):
                found = env_id, queue[0]
        return found

    def _has_room(self, env_id: str) -> bool:
        if self._total is not None and self._started >= self._total:
            return False
        limit = self._of_environment.get(env_id)
        return limit is None or self._running[env_id] < limit


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
            if not turn.cancelled():
                self._free_place()  # it was given one at that moment
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
