"""Answers on their way to agents: as server-sent events while they are sampled, and again to a client that retries.

A reply enters the record when it is sampled, whether or not it arrives. OpenAI's clients retry by themselves if a
connection breaks, if a server in between answers 429 or 5xx, or if they have waited too long; a header marks the retry.
Then the client receives the same answer, and nothing is resampled. Without this module the record would hold a reply
that the agent never saw beside the one that it continued with.
"""

import asyncio
import hashlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from rollgym.trainer.rollout.agents.answers import Completion
from rollgym.trainer.rollout.agents.errors import ApiError
from rollgym.trainer.rollout.agents.streaming import Delta

Event = Mapping[str, Any]


class Events(Protocol):
    """Makes the events of one answer, as one of the APIs has them."""

    def says(self, choice: int, deltas: Sequence[Delta]) -> Iterator[Event]:
        """Yield events for the new part of the answer."""
        ...

    def fails(self, error: ApiError) -> Iterator[Event]:
        """Yield the events that end a stream that failed."""
        ...


class LiveAnswer:
    """Queues the parts of an answer for the task that writes them to the client; see `AnswerListener`.

    Attributes:
        answer: The answer as it begins; None before.
    """

    def __init__(self) -> None:
        self.answer: Completion | None = None
        self._parts: deque[tuple[int, Sequence[Delta]]] = deque()
        self._news = asyncio.Event()
        self._closed = False

    def begins(self, answer: Completion) -> None:
        """Note that the prompt is ready and sampling begins."""
        self.answer = answer

    def says(self, choice: int, deltas: Sequence[Delta]) -> None:
        """Note that more of a choice can be sent."""
        self._parts.append((choice, deltas))
        self._news.set()

    def close(self, working: "asyncio.Task[Completion]") -> None:
        """Close the queue once `working` has ended."""
        if not working.cancelled():
            working.exception()  # the writer reports the failure, unless it has gone
        self._closed = True
        self._news.set()

    async def started(self) -> None:
        """Wait until something has come, or nothing will."""
        await self._news.wait()

    async def parts(self) -> AsyncIterator[tuple[int, Sequence[Delta]]]:
        """Yield the number of a choice and its next part, until the end."""
        while True:
            while self._parts:
                yield self._parts.popleft()
            if self._closed:
                return
            self._news.clear()
            await self._news.wait()


class EventStream(StreamingResponse):
    """Return an answer's events as a response. If the client disconnects, the answer is cancelled.

    Args:
        working: Samples the answer.
        live: Queue of the answer's parts.
        events: Makes events of that.
        ended: Makes the last events of the whole answer.
        failed: Turns a failure into the error that the agent receives.
        write: Writes an event.
        last: Written after all events.
        headers: Headers of the response.
    """

    def __init__(
        self,
        working: "asyncio.Task[Completion]",
        live: LiveAnswer,
        events: Events,
        *,
        ended: Callable[[Completion], Iterable[Event]],
        failed: Callable[[BaseException], ApiError],
        write: Callable[[Event], bytes],
        last: bytes,
        headers: Mapping[str, str],
    ) -> None:
        self._working, self._live, self._events = working, live, events
        self._ended, self._failed = ended, failed
        self._write, self._last = write, last
        super().__init__(self._written(), headers=headers, media_type="text/event-stream")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write it out; see Starlette."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._working.cancel()

    async def _written(self) -> AsyncIterator[bytes]:
        async for choice, deltas in self._live.parts():
            for event in self._events.says(choice, deltas):
                yield self._write(event)
        for event in self._last_events():
            yield self._write(event)
        if self._last:
            yield self._last

    def _last_events(self) -> Iterable[Event]:
        if self._working.cancelled():
            return ()
        error = self._working.exception()
        return (
            self._ended(self._working.result()) if error is None else self._events.fails(self._failed(error))
        )


_RETRY_HEADER = "x-stainless-retry-count"
"""Header in which OpenAI's libraries count their retries; the first attempt is 0."""
_KEY_HEADER = "idempotency-key"
_REMEMBERED = 64
"""Answers of a session that may be asked for again: clients do it within seconds."""


class Delivery:
    """One answer, and its waiting requests.

    Args:
        asked: Names the request.
        work: Samples the answer.
    """

    def __init__(self, asked: bytes, work: Coroutine[Any, Any, Completion]) -> None:
        self.asked = asked
        self.working = asyncio.get_running_loop().create_task(work)
        self.is_one_of_several = False
        self._waiting = 0

    @property
    def is_wanted(self) -> bool:
        """Whether there is an answer, or there will be one."""
        if not self.working.done():
            return not self.working.cancelling()
        return not self.working.cancelled() and self.working.exception() is None

    async def answer(self) -> Completion:
        """Wait for the answer; cancel it once its last waiter is gone."""
        self._waiting += 1
        try:
            return await asyncio.shield(self.working)
        finally:
            self._waiting -= 1
            if not self._waiting and not self.working.done():
                self.working.cancel()
                await asyncio.wait({self.working})


class Deliveries:
    """The latest answers of a session, by what was asked."""

    def __init__(self) -> None:
        self._latest: deque[Delivery] = deque(maxlen=_REMEMBERED)

    def begin(self, asked: bytes, work: Coroutine[Any, Any, Completion]) -> Delivery:
        """Answer a request that was not asked before."""
        delivery = Delivery(asked, work)
        for other in self._latest:
            if other.asked == asked and not other.working.done():
                other.is_one_of_several = delivery.is_one_of_several = True
        self._latest.append(delivery)
        return delivery

    def again(self, request: Request, asked: bytes) -> Delivery | None:
        """Return the answer that a retried request asks for.

        None if the request is a first attempt, if the attempt before it failed, or if equal requests were in flight at
        the same time, so that the lost answer cannot be identified.
        """
        if not _is_retry(request):
            return None
        # An older answer than that attempt's was asked for by a request of its own, which has had it.
        latest = next((each for each in reversed(self._latest) if each.asked == asked), None)
        if latest is None or not latest.is_wanted or latest.is_one_of_several:
            return None
        return latest


def name_of(request: Request, body: bytes) -> bytes:
    """Return what equal requests have in common, and no others."""
    key = request.headers.get(_KEY_HEADER, "")
    return hashlib.blake2b(f"{request.url.path}\n{key}\n".encode() + body, digest_size=16).digest()


def _is_retry(request: Request) -> bool:
    if _KEY_HEADER in request.headers:
        return True  # a client that names its requests uses each name once
    count = request.headers.get(_RETRY_HEADER, "")
    return count.isascii() and count.isdigit() and int(count[:9]) > 0
