"""Tools for work within the event loop: answers that come later, and slices of the loop's time."""

import asyncio
from collections.abc import Callable, Generator, Sequence
from time import perf_counter
from typing import Any, TypeVar

from rollgym.clients.protocol.errors import ProblemError

Listener = Callable[[Any, Any], None]
"""Takes a tag of the listener's own and the answer, or the `ProblemError` that is the answer."""

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

_NOT_YET = object()
# What takes a microsecond or ten is done so often without a look at the clock.
_MANY = 256
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


async def in_slices(work: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
    """Do the same with each of many, in slices of the loop's time; what it raises ends it."""
    done: list[_Result] = []
    end = perf_counter() + SLICE_S
    for first in range(0, len(items), _MANY):
        done += map(work, items[first : first + _MANY])
        if perf_counter() >= end:
            await asyncio.sleep(0)
            end = perf_counter() + SLICE_S
    return done


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
