"""How many requests to a third party's server run at one time, and how many connections it has to accept at once."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

# Python's `http.server`, for one, has room for five connections that it has not accepted yet.
_AT_ONCE = 4
# A connection that is not answered is taken for accepted after so long. The time is longer after one was lost.
_FIRST_PATIENCE_S = 0.05
_SHORTEST_PATIENCE_S = 0.0125
_LONGEST_PATIENCE_S = 1.6
# A server without room lets an attempt to connect be lost; the next comes after a second.
_LOST_ATTEMPT_S = 0.9
_REMEMBERED_S = 60.0


class Turns:
    """Lets so many in at one time, the others in their order after them.

    Args:
        most: How many.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._inside = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def enter(self) -> None:
        """Wait for one's turn."""
        if self._inside < self.most and not self._waiting:
            self._inside += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                # It had come already.
                self.leave()
            raise

    def leave(self) -> None:
        """Let the next one in."""
        self._inside -= 1
        while self._waiting and self._inside < self.most:
            turn = self._waiting.popleft()
            if not turn.done():
                self._inside += 1
                turn.set_result(None)


class Attempt:
    """One request, and the connection that it may have to make.

    Args:
        limiter: What it keeps to.
    """

    def __init__(self, limiter: "ConnectionLimiter") -> None:
        self._limiter = limiter
        self._loop = asyncio.get_running_loop()
        self._began_at = 0.0
        self._accepted: asyncio.TimerHandle | None = None
        self.connects = False

    async def connecting(self) -> None:
        """Wait until the server can take one more connection."""
        await self._limiter.unaccepted.enter()
        self.connects = True
        self._began_at = self._loop.time()
        self._accepted = self._loop.call_later(self._limiter.patience_s, self._leave)

    def connected(self) -> None:
        """Note that the connection is there, or could not be made."""
        if self._loop.time() - self._began_at >= _LOST_ATTEMPT_S:
            self._limiter.lost(self._began_at)

    def ended(self, *, lost: bool) -> None:
        """Note that the request is answered, or that its connection was lost."""
        if self.connects and lost:
            self._limiter.lost(self._began_at)
        if self._accepted is not None:
            self._accepted.cancel()
            self._leave()

    def _leave(self) -> None:
        self._accepted = None
        self._limiter.unaccepted.leave()


class ConnectionLimiter:
    """Lets so many requests to one server run at a time, and has it accept few connections at once.

    Args:
        most: How many requests run at one time.

    Attributes:
        unaccepted: Connections that the server may not have accepted yet.
        patience_s: How long one that is not answered is among them.
    """

    def __init__(self, most: int) -> None:
        self._requests = Turns(most)
        self.unaccepted = Turns(_AT_ONCE)
        self.patience_s = _FIRST_PATIENCE_S
        self._changed_at = asyncio.get_running_loop().time()

    def narrow(self, most: int) -> None:
        """Let no more requests run than this from now on."""
        self._requests.most = min(most, self._requests.most)

    @asynccontextmanager
    async def request(self) -> AsyncIterator[Attempt]:
        """Wait for one's turn, and hold it."""
        await self._requests.enter()
        try:
            yield Attempt(self)
        finally:
            self._requests.leave()
            self._recover()

    def lost(self, began_at: float) -> None:
        """Note that a connection was lost that began then; of several that were lost together, one counts."""
        if began_at >= self._changed_at:
            self.patience_s = min(_LONGEST_PATIENCE_S, 2 * self.patience_s)
            self._changed_at = asyncio.get_running_loop().time()

    def _recover(self) -> None:
        now = asyncio.get_running_loop().time()
        if now >= self._changed_at + _REMEMBERED_S:
            self.patience_s = max(_SHORTEST_PATIENCE_S, self.patience_s / 2)
            self._changed_at = now
