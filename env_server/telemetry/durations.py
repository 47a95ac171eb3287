"""How long things took, counted in buckets."""

import time
from bisect import bisect_left
from collections import defaultdict, deque
from typing import NamedTuple

BOUNDS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0),
)
"""The upper bounds of the buckets, in seconds; longer durations go to one more."""


TIMED_STEPS = 16
"""Of steps that do not wait, each 16th is timed and counts for 16: timing all would cost a few percent."""


class Durations:
    """A histogram of plain numbers: no lock and no label look-up, since it is added to at every step.

    Attributes:
        counts: How many durations are in each bucket.
        total: Their sum, in seconds.
    """

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)
        self.total = 0.0

    def add(self, seconds: float, times: int = 1) -> None:
        """Count a duration, which may stand for several."""
        self.counts[bisect_left(BOUNDS, seconds)] += times
        self.total += seconds * times


LONG_S = 0.1
"""Operations of at least this duration are recorded by name: in the event loop, all clients have waited for them."""

_MOST_LONG = 64


class LongRun(NamedTuple):
    """An operation that took long.

    Attributes:
        op: The operation.
        env_id: The environment's id.
        seconds: The duration.
        ended: When, on the clock of `time.perf_counter`.
    """

    op: str
    env_id: str
    seconds: float
    ended: float


class OperationTimes:
    """How long the operations of one kind of worker took, by operation.

    Attributes:
        ran: The time that the environment took.
        waited: The time before that, in which the worker did other things.
    """

    def __init__(self) -> None:
        self.ran: defaultdict[str, Durations] = defaultdict(Durations)
        self.waited: defaultdict[str, Durations] = defaultdict(Durations)
        self._long: deque[LongRun] = deque(maxlen=_MOST_LONG)

    def note_long(self, op: str, env_id: str, seconds: float) -> None:
        """Keep an operation that took `LONG_S` or more, and has just ended."""
        self._long.append(LongRun(op, env_id, seconds, time.perf_counter()))

    def taken_long(self) -> list[LongRun]:
        """The latest operations that took long; each is given once."""
        found = list(self._long)
        self._long.clear()
        return found
