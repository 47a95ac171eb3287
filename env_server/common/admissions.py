"""What comes in at once is not all done in one turn of the event loop: as much as milliseconds take, and then the next.

Connections that are ready at the same time are all read in one turn, and their requests all begun in the one after it.
Each takes a fraction of a millisecond; a thousand of them would keep everybody else waiting for the sum.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from time import perf_counter

from rollgym.env_server.common.event_loop import SLICE_S

_HALF_S = SLICE_S / 2


class Admissions:
    """Says for how much work a turn of the event loop has time, and has the rest wait in the order in which it came.

    Where nobody waits, a look at the clock is all that it costs. At least one is admitted in each turn.

    Args:
        clock: Gives the time, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._end = clock()
        self._admitted = 0
        # A callback of ours is due at the begin of the next turn.
        self._is_marked = False
        # Others are woken behind those who were woken for the turn that comes.
        self._is_waking = False
        self._line: deque[_Place] = deque()
        self._again: list[_Place] = []

    def are_open(self) -> bool:
        """Whether who comes now may work at once, without an await; who may not stands in line."""
        return not (self._line or self._again) and self._has_time()

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
        now = self._clock()
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
        self._line.extendleft(reversed(self._again))
        self._again.clear()
        if not self._line:
            return
        # First of all, so that the next turn begins before those are there who are woken.
        self._mark()
        for _ in range(min(2 * admitted + 1, len(self._line))):
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
