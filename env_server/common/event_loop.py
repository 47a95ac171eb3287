"""Work within the event loop: answers that come later, slices of the loop's time, and what comes in at once.

What comes in at once is not all done in one turn: as much as milliseconds take, and then the next. Connections that are
ready at the same time are all read in one turn, and their requests all begun in the one after it. Each takes a fraction
of a millisecond; a thousand of them would keep everybody else waiting for the sum.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Generator, Sequence
from functools import partial
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

_HALF_S = SLICE_S / 2


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


class Admissions:
    """Says for how much work a turn of the event loop has time, and has the rest wait in the order in which it came.

    If no request waits, a look at the clock is all that it costs. At least one is admitted in each turn.

    Args:
        clock: Gives the time, in seconds.

    Attributes:
        admitted_at: When the last one was admitted, on that clock; who is admitted need not look at it again.
    """

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._end = self.admitted_at = clock()
        self._admitted = 0
        # A callback of ours is due at the begin of the next turn.
        self._is_marked = False
        # Others are woken behind those who were woken for the turn that comes.
        self._is_waking = False
        self._woken = 0
        self._line: deque[_Place] = deque()
        self._again: list[_Place] = []

    def are_open(self) -> bool:
        """Whether who comes now may work at once, without an await; who may not stands in line."""
        if self._line or self._again:
            return False
        self.admitted_at = now = self._clock()
        if now < self._end:
            # Where nobody waits, all but the first of a turn are admitted here.
            self._admitted += 1
            return True
        return self._has_time()

    async def turn(self) -> None:
        """Wait until one may work, without an await."""
        if self.are_open():
            return
        woken = asyncio.get_running_loop().create_future()
        place = _Place(partial(_tell, woken), self._clock())
        self._stand(place)
        await woken
        while not self._has_time():
            woken = asyncio.get_running_loop().create_future()
            place.wake = partial(_tell, woken)
            self._again.append(place)
            await woken

    def call(self, work: Callable[[], None]) -> None:
        """Have something done when its turn has come; never at once."""
        place = _Place(lambda: None, self._clock())
        place.wake = partial(asyncio.get_running_loop().call_soon, self._work, place, work)
        self._stand(place)

    @property
    def waiting(self) -> int:
        """How many stand in line."""
        return len(self._line) + len(self._again)

    @property
    def waited_s(self) -> float:
        """How long the first in line has waited by now."""
        if not self.waiting:
            return 0.0
        return self._clock() - (self._again or self._line)[0].since

    def _stand(self, place: "_Place") -> None:
        self._line.append(place)
        self._mark()

    def _work(self, place: "_Place", work: Callable[[], None]) -> None:
        if self._has_time():
            work()
        else:
            self._again.append(place)

    def _has_time(self) -> bool:
        self.admitted_at = now = self._clock()
        if now >= self._end and self._admitted:
            if self._is_marked:
                return False
            # It may be another turn already. If it is not, the next look will know.
            self._mark()
            self._end = now + _HALF_S
        self._admitted += 1
        return True

    def _mark(self) -> None:
        if not self._is_marked:
            self._is_marked = True
            asyncio.get_running_loop().call_soon(self._begin_turn)

    def _begin_turn(self) -> None:
        """Have this turn's time begin."""
        self._is_marked = False
        admitted, self._admitted = self._admitted, 0
        self._end = self._clock() + SLICE_S
        if self._is_waking:
            # So that it is known when the turn ends in which those work who were woken.
            self._mark()
        else:
            self._wake(admitted)

    def _go_on(self) -> None:
        """After those who were woken for this turn, wake others for the next."""
        self._is_waking = False
        self._wake(self._admitted)

    def _wake(self, admitted: int) -> None:
        """Wake more than a turn had time for; those for whom it has none go back to the front."""
        # Who is woken in vain costs as much as half of a small operation: where some were, only a few more are.
        worked = self._woken - len(self._again)
        most = worked + worked // 4 + 1 if self._again else 2 * admitted + 1
        self._line.extendleft(reversed(self._again))
        self._again.clear()
        self._woken = min(most, len(self._line))
        if not self._line:
            return
        # First of all, so that the next turn begins before those are there who are woken.
        self._mark()
        for _ in range(self._woken):
            self._line.popleft().wake()
        self._is_waking = True
        asyncio.get_running_loop().call_soon(self._go_on)


class _Place:
    """A place in line.

    Attributes:
        wake: Tells who stands there that its turn may have come.
        since: When it was taken.
    """

    __slots__ = ("since", "wake")

    def __init__(self, wake: Callable[[], object], since: float) -> None:
        self.wake = wake
        self.since = since


def _tell(woken: "asyncio.Future[None]") -> None:
    # Who was cancelled waits no longer.
    if not woken.done():
        woken.set_result(None)
