"""How long requests wait for the event loop, and whether the delay has been too long for too long.

The rule is that of controlled delay (CoDel, RFC 8289): a burst, or the backlog of a loop that was blocked, is worked
off; a queue that does not get shorter is cut, since its requests would only wait ever longer.
"""

import asyncio
import fcntl
import logging
import math
import struct
import termios
from collections import deque
from collections.abc import Callable
from time import perf_counter

from rollgym.clients.protocol.errors import ProblemError
from rollgym.env_server.common.event_loop import Admissions

_BEAT_S = 0.05
# A read of this many bytes may have left some in the kernel.
_LARGE_READ = 65536
_MOST_RETRY_S = 30
# So few late requests at one time do not count as a queue.
_FEW = 8
_TOLD_AGAIN_S = 60.0
_INT = struct.Struct("i")

_log = logging.getLogger(__name__)


class QueueDelay:
    """Whether a queue has been late for so long that new requests must be refused.

    Args:
        limit_s: How long a request may wait, in seconds: after half of it the request is late, and late requests are
            refused once the queue has been late for the other half.

    Attributes:
        late_since: Since when the queue has been late; None if it is not.
    """

    __slots__ = ("_half", "_seen_at", "late_since")

    def __init__(self, limit_s: float) -> None:
        self._half = limit_s / 2
        self.late_since: float | None = None
        self._seen_at = 0.0

    def is_late(self, waited_s: float, now: float) -> bool:
        """Whether a request that has waited this long must be refused now."""
        if waited_s < self._half:
            self.late_since = None
            return False
        # What came long after everything before it was done is the begin of another queue.
        if self.late_since is None or now - waited_s - self._seen_at > self._half:
            self.late_since = now
        self._seen_at = now
        return now - self.late_since >= self._half


class Overload:
    """Whether this process is behind: whether its event loop takes too long to come to what has come in.

    Args:
        limit_s: How long something may wait for the loop.
        line: What the loop has seen, and has put off to later turns.

    Attributes:
        late_s: What has waited for so long is late.
        beats: How often the loop was seen to go round; once in each turn that takes long.
        looked_at: When it was seen the last time but one. It has looked for what had come in since then, so that what
            it takes in now, of a connection that it read all the time, came after that.
    """

    def __init__(self, limit_s: float, line: Admissions | None = None) -> None:
        self.limit_s = limit_s
        self._line = Admissions() if line is None else line
        self.late_s = limit_s / 2
        self._delay = QueueDelay(limit_s)
        self._requests = QueueDelay(limit_s)
        self._last = self.looked_at = perf_counter()
        self.beats = 0
        self._is_behind = False
        self._late_now = self._late_before = 0
        self._timer: asyncio.TimerHandle | None = None
        self._told_until = 0.0

    def start(self) -> None:
        """Start to watch the loop."""
        self._last = self.looked_at = perf_counter()
        self._arm()

    def stop(self) -> None:
        """Stop watching the event loop."""
        if self._timer is not None:
            self._timer.cancel()

    @property
    def is_behind(self) -> bool:
        """Whether the loop has been late for too long; the turn that it is at may have ended that."""
        return self._is_behind

    def excess_s(self, came: float | None = None) -> float:
        """How long what is taken in now may have waited, where that is too long; otherwise 0.

        Args:
            came: When it was read, if that was before.
        """
        now = perf_counter()
        waited = now - (self.looked_at if came is None or came > self.looked_at else came)
        if waited < self.late_s and self._requests.late_since is None:
            # Without load, every request ends here.
            return 0.0
        is_late = self._requests.is_late(waited, now) or self._is_behind
        return waited if waited >= self.late_s and self.is_queue() and is_late else 0.0

    def is_queue(self, behind_it: int = 0) -> bool:
        """Whether something that is late is not one of a few.

        Args:
            behind_it: How many are known to wait behind it.
        """
        self._late_now += 1
        return max(self._late_now, self._late_before, behind_it, self._line.waiting) > _FEW

    def note_refusal(self, waited_s: float) -> None:
        """Write to the log that something is refused, once in a while."""
        now = perf_counter()
        if now >= self._told_until:
            self._told_until = now + _TOLD_AGAIN_S
            _log.warning(
                "this process is behind: requests have waited for %.1f s, and are answered `overloaded`; more "
                "processes (`--processes`), or more servers behind a gateway, take more",
                waited_s,
            )

    def _arm(self) -> None:
        # Timers come at the begin of a turn of the loop, before it looks for what has come in.
        self._timer = asyncio.get_running_loop().call_later(_BEAT_S, self._beat)

    def _beat(self) -> None:
        self.beats += 1
        self.looked_at, self._last = self._last, perf_counter()
        self._late_before, self._late_now = self._late_now, 0
        waited = max(self._last - self.looked_at - _BEAT_S, self._line.waited_s)
        self._is_behind = self._delay.is_late(waited, self._last)
        self._arm()


def overloaded(waited_s: float) -> ProblemError:
    """The problem that a request has waited for too long to be begun.

    A queue takes about as long to work off as its first one has waited: it is twice that until they come again.
    """
    return ProblemError(
        "overloaded",
        f"the server is behind by {waited_s:.1f} s, and has not begun this: ask again later",
        retry_after=max(1, min(_MOST_RETRY_S, math.ceil(2 * waited_s))),
    )


class Arrivals:
    """When the data of one connection came that is taken in now, at the earliest.

    It may have lain in the kernel, which does not say since when. What a read has left nothing of came after it, and
    so did what came while the loop looked and found nothing.

    Args:
        waiting: How many messages were taken in and are not looked at yet.

    Attributes:
        since: When it came.
        waiting: As above.
    """

    __slots__ = ("_known", "_overload", "_read", "_read_on_beat", "_stamps", "since", "waiting")

    def __init__(self, waiting: Callable[[], int]) -> None:
        self.waiting = waiting
        self._overload: Overload | None = None
        self._known = self.since = perf_counter()
        self._read = self._read_on_beat = 0
        self._stamps: deque[tuple[int, float]] | None = None

    def follow(self, overload: Overload) -> None:
        """Know when the loop looks."""
        self._overload = overload

    def come(self, size: int, transport: asyncio.Transport) -> None:
        """Note a read of so many bytes; what came before it is taken in."""
        now = perf_counter()
        if self._stamps is not None:
            self._find_stamp()
        self.since = self._known
        overload = self._overload
        if overload is not None and self._read_on_beat < overload.beats - 1:
            self.since = max(self.since, overload.looked_at)
        self._read += size
        if size >= _LARGE_READ and (left := _unread(transport)):
            if self._stamps is None:
                self._stamps = deque()
            self._stamps.append((self._read + left, now))
            return
        self._stamps = None
        self._known = now

    def read_on(self) -> None:
        """Note that all was taken in, and the connection is read again."""
        if self._overload is not None:
            self._read_on_beat = self._overload.beats

    def excuse(self) -> None:
        """Note that it was the peer who kept the connection waiting."""
        self._stamps = None
        self._known = perf_counter()

    def _find_stamp(self) -> None:
        """Look which reads have left nothing of what comes now."""
        while self._stamps and self._stamps[0][0] <= self._read:
            self._known = self._stamps.popleft()[1]


def _unread(transport: asyncio.Transport) -> int:
    """How many bytes the kernel has of a connection."""
    connection = transport.get_extra_info("socket")
    if connection is None or connection.fileno() < 0:
        return 0
    found: int = _INT.unpack(fcntl.ioctl(connection.fileno(), termios.FIONREAD, bytes(_INT.size)))[0]
    return found
