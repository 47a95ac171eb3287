"""Tools for work within the event loop: answers that come later, and slices of the loop's time."""

import asyncio
from collections.abc import Callable, Generator
from time import perf_counter
from typing import Any

from rollgym.clients.protocol.errors import ProblemError

Listener = Callable[[Any, Any], None]
"""Takes a tag of the listener's own and the answer, or the `ProblemError` that is the answer."""

_NOT_YET = object()
SLICE_S = 0.005
"""How long the work of one client, or of one operation, may block the loop for the others."""


class Pending:
    """An answer that is delivered to one listener, or awaited."""

    __slots__ = ("_answer", "_listener", "_tag")

    def __init__(self) -> None:
        self._answer: Any = _NOT_YET
        self._listener: Listener | None = None
        self._tag: Any = None

    def listen(self, listener: Listener, tag: Any) -> None:
        """Have the listener called with the answer, at once if it is there."""
        if self._answer is not _NOT_YET:
            listener(tag, self._answer)
            return
        self._listener = listener
        self._tag = tag

    def answer(self, answer: Any) -> None:
        """Give the answer, or the `ProblemError` that is it; a second one is not heard."""
        if self._answer is not _NOT_YET:
            return
        self._answer = answer
        if self._listener is not None:
            self._listener(self._tag, answer)

    def __await__(self) -> Generator[Any, None, Any]:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.listen(_resolve, future)
        return future.__await__()


def is_given_up() -> bool:
    """Whether the task that runs is being cancelled; if not, a `CancelledError` that it meets is that of another."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _resolve(future: "asyncio.Future[Any]", answer: Any) -> None:
    if future.done():
        return
    if isinstance(answer, ProblemError):
        future.set_exception(answer)
    else:
        future.set_result(answer)


class Slices:
    """Gives tasks that compute in the loop their turns one after another, and lets the loop run in between.

    Tasks that are ready at the same time all run in one turn of the loop: a thousand tasks of a few milliseconds each
    would block all others for seconds.
    """

    def __init__(self) -> None:
        self._one_at_a_time = asyncio.Lock()
        self._end = 0.0

    async def turn(self) -> None:
        """Wait until it is one's turn to work without an await."""
        async with self._one_at_a_time:
            if perf_counter() >= self._end:
                await asyncio.sleep(0)
                self._end = perf_counter() + SLICE_S
