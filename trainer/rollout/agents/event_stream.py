"""Answers as server-sent events, written out while they are sampled."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from rollgym.trainer.rollout.agents.answers import Answer
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
        self.answer: Answer | None = None
        self._parts: deque[tuple[int, Sequence[Delta]]] = deque()
        self._news = asyncio.Event()
        self._closed = False

    def begins(self, answer: Answer) -> None:
        """Note that the prompt is ready and sampling begins."""
        self.answer = answer

    def says(self, choice: int, deltas: Sequence[Delta]) -> None:
        """Note that more of a choice can be sent."""
        self._parts.append((choice, deltas))
        self._news.set()

    def close(self, working: "asyncio.Task[Answer]") -> None:
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
        working: "asyncio.Task[Answer]",
        live: LiveAnswer,
        events: Events,
        *,
        ended: Callable[[Answer], Iterable[Event]],
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
