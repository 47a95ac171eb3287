"""Ends sessions that nobody uses: one heap and one timer for all of them."""

import asyncio
import heapq
import itertools
from collections.abc import Callable

from env_server.sessions.base_session import BaseSession

_RUNNING_WAIT_S = 1.0
_COMPACT_ABOVE = 64


class Expiry:
    """Watches deadlines of sessions.

    A session has one valid entry in the heap. Using a session does not touch the heap: an entry that comes up early
    is put back at its new time, so the cost is one heap operation for each idle time-out and not for each step.

    Args:
        linger_s: How long an orphaned session stays.
        expire: Called with each session whose time is over and which runs nothing.
    """

    def __init__(self, linger_s: float, expire: Callable[[BaseSession], None]) -> None:
        self._linger_s = linger_s
        self._expire = expire
        self._heap: list[tuple[float, int, BaseSession]] = []
        self._order = itertools.count()
        self._valid: dict[str, int] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0

    def watch(self, session: BaseSession) -> None:
        """Watch a new session, or one whose deadline came nearer."""
        self._push(self._deadline(session), session)
        self._compact()
        self._arm()

    def forget(self, session: BaseSession) -> None:
        """Let go of a session that ended."""
        self._valid.pop(session.session_id, None)
        self._compact()

    def stop(self) -> None:
        """Watch no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._heap.clear()
        self._valid.clear()

    def _push(self, deadline: float, session: BaseSession) -> None:
        order = next(self._order)
        self._valid[session.session_id] = order
        heapq.heappush(self._heap, (deadline, order, session))

    def _compact(self) -> None:
        """Throw dead entries away when they are most of the heap, so that ended sessions can be freed."""
        if len(self._heap) > _COMPACT_ABOVE and len(self._heap) > 2 * len(self._valid):
            self._heap = [entry for entry in self._heap if self._valid.get(entry[2].session_id) == entry[1]]
            heapq.heapify(self._heap)

    def _deadline(self, session: BaseSession) -> float:
        deadline = session.last_used + session.idle_timeout_s
        if session.orphaned_at is not None:
            # A call over HTTP uses an orphan as a socket would, and so renews its time.
            deadline = min(deadline, max(session.orphaned_at, session.last_used) + self._linger_s)
        return deadline

    def _arm(self) -> None:
        if not self._heap:
            return
        first = self._heap[0][0]
        if self._timer is not None:
            if self._timer_at <= first:
                return
            self._timer.cancel()
        # A deadline that has passed makes uvloop's timer a plain handle, which does not know when it is due.
        self._timer_at = first
        self._timer = asyncio.get_running_loop().call_at(first, self._wake)

    def _wake(self) -> None:
        self._timer = None
        # The loop may call a timer a clock tick early; the entry that it was set for is due all the same.
        now = asyncio.get_running_loop().time() + 1e-3
        while self._heap and self._heap[0][0] <= now:
            _, order, session = heapq.heappop(self._heap)
            if self._valid.get(session.session_id) != order:
                continue
            deadline = self._deadline(session)
            if deadline > now:
                self._push(deadline, session)
            elif session.is_busy:
                # The operation ends by itself or by its time-out, and counts as use.
                self._push(now + _RUNNING_WAIT_S, session)
            else:
                del self._valid[session.session_id]
                self._expire(session)
        self._arm()
