"""Connections to registered servers, and how many at one time a third party's has to accept."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from ssl import SSLContext
from typing import Any

import httpcore
import httpx

# Python's `http.server`, for one, has room for five connections that it has not accepted yet.
_AT_ONCE = 4
# After this time, an unanswered connection counts as accepted. The time grows after a lost connection.
_FIRST_PATIENCE_S = 0.05
_SHORTEST_PATIENCE_S = 0.0125
_LONGEST_PATIENCE_S = 1.6
# A server without room lets an attempt to connect be lost; the next comes after a second.
_LOST_ATTEMPT_S = 0.9
_REMEMBERED_S = 60.0
_MOST_INTERIM = 16
_STATUS_BYTES = 10


def connect(
    *, limits: httpx.Limits | None = None, verify: bool = True, **arguments: Any
) -> httpx.AsyncClient:
    """Make a client that raises only httpx's errors when connections break.

    Args:
        limits: The connections that it has and keeps; httpx's own, if None.
        verify: Whether it knows how to verify certificates; one that never speaks TLS need not.
        **arguments: Of `httpx.AsyncClient`. Environment variables are ignored.
    """
    transport = httpx.AsyncHTTPTransport(verify=verify, trust_env=False, limits=limits or httpx.Limits())
    # httpx hands no backend on.
    transport._pool._network_backend = Backend()
    return httpx.AsyncClient(transport=transport, trust_env=False, **arguments)


class Backend(httpcore.AsyncNetworkBackend):
    """Opens httpcore's connections through anyio."""

    def __init__(self) -> None:
        self._backend = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Open a TCP connection to the address."""
        return _Stream(
            await self._backend.connect_tcp(
                host, port, timeout, local_address, None if socket_options is None else list(socket_options)
            )
        )

    async def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: Iterable[Any] | None = None
    ) -> httpcore.AsyncNetworkStream:
        """Open a connection within this machine."""
        options = None if socket_options is None else list(socket_options)
        return _Stream(await self._backend.connect_unix_socket(path, timeout, options))

    async def sleep(self, seconds: float) -> None:
        """Wait, as httpcore does between retries."""
        await self._backend.sleep(seconds)


class _Stream(httpcore.AsyncNetworkStream):
    """A connection that keeps its properties after it has broken, and that bounds interim (1xx) answers."""

    def __init__(self, stream: httpcore.AsyncNetworkStream) -> None:
        self._stream = stream
        self._interim: InterimAnswers | None = None

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        data = await self._stream.read(max_bytes, timeout)
        if self._interim is not None and not self._interim.take(data):
            self._interim = None
        return data

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._interim = InterimAnswers()
        await self._stream.write(buffer, timeout)

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def start_tls(
        self, ssl_context: SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.AsyncNetworkStream:
        return _Stream(await self._stream.start_tls(ssl_context, server_hostname, timeout))

    def get_extra_info(self, info: str) -> Any:
        try:
            return self._stream.get_extra_info(info)
        except AttributeError:
            # It has no socket any more. An idle connection that can be read from is one that has come to its end.
            return True if info == "is_readable" else None


class InterimAnswers:
    """The answers of 100 to 199 before the one that counts: each is read, and a server may send them for ever."""

    def __init__(self) -> None:
        self._count = 0
        self._rest = b""

    def take(self, data: bytes) -> bool:
        """Count the interim answers in received bytes; return whether more may come.

        Raises:
            httpcore.RemoteProtocolError: There are too many.
        """
        content = self._rest + data
        at = 0
        while content[at : at + 7] == b"HTTP/1." and content[at + 8 : at + 10] == b" 1":
            end = content.find(b"\r\n\r\n", at)
            if end < 0:
                break
            at = end + 4
            self._count += 1
            if self._count > _MOST_INTERIM:
                raise httpcore.RemoteProtocolError(f"it says to wait more than {_MOST_INTERIM} times")
        self._rest = content[at:]
        return len(self._rest) < _STATUS_BYTES or self._rest[8:10] == b" 1"


class Turns:
    """A semaphore that admits waiting tasks in order.

    Args:
        most: How many tasks may be inside at one time.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._inside = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def enter(self) -> None:
        """Wait for a free place."""
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
        limiter: The limiter that it obeys.
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
    """Bounds the concurrent requests to one server, and the connections that it has not accepted yet.

    Args:
        most: The number of concurrent requests.

    Attributes:
        unaccepted: Connections that the server may not have accepted yet.
        patience_s: How long an unanswered connection counts as not accepted, in seconds.
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
