"""A connection: requests with ids over one WebSocket, answered in any order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple

from rollgym.clients.net.transport import ConnectionLost, WebSocket
from rollgym.clients.protocol.arrays import DecodeError
from rollgym.clients.protocol.errors import ProblemError
from rollgym.clients.protocol.frames import dumps, loads
from rollgym.clients.protocol.long_content import LONG, read_long

_TICK_S = 1.0


class Reply(NamedTuple):
    """The answer to a request.

    Attributes:
        payload: The `ok` object, or the list of `results` of a batch.
        plain: Whether it certainly holds neither arrays nor bytes, so that free-form values need no decoding.
        process: Index of the I/O process that answered.
    """

    payload: Any
    plain: bool
    process: int


class Connection:
    """Requests over one WebSocket to one I/O process.

    Time-outs are checked once a second for all requests together: a timer for each would cost more CPU than the
    request itself.

    Args:
        socket: The open WebSocket.
        binary: Whether frames are MessagePack.
        silence_s: Seconds of silence, while answers are pending, after which the peer gets a ping ...
        pong_s: ... and seconds to wait for its pong before the connection is dropped. An idle client sends no pings.

    Attributes:
        process: Index of the I/O process at the other end.
        open: Whether requests can be sent.
        heard_nonsense: Whether it was dropped because the peer does not speak this protocol.
        on_lost: Called when the connection breaks; not when it is closed from here.
    """

    def __init__(self, socket: WebSocket, *, binary: bool, silence_s: float, pong_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket = socket
        self._binary = binary
        self._silence_s = silence_s
        self._pong_s = pong_s
        self._next_id = 0
        self._waiting: dict[int, tuple[asyncio.Future[Reply], float]] = {}
        self._reading: set[asyncio.Task[None]] = set()
        self._tick_handle: asyncio.TimerHandle | None = None
        self._heard_at = self._loop.time()
        self._pinged_at: float | None = None
        self.process = 0
        self.heard_nonsense = False
        self.open = True
        self.on_lost: Callable[[], None] | None = None
        socket.on_message = self._receive
        socket.on_pong = self._hear
        socket.closed.add_done_callback(self._fail_all)

    @property
    def waiting(self) -> int:
        """How many requests are not answered yet."""
        return len(self._waiting)

    def request(self, fields: dict[str, Any], deadline: float, max_bytes: int) -> asyncio.Future[Reply]:
        """Send a request; the future gives the reply, or raises the error of the server or of the socket.

        Args:
            fields: The frame without its id.
            deadline: When to give up, on the loop's clock.
            max_bytes: The server's limit. It would close the socket, and with it everybody's, over a larger frame.

        Raises:
            ConnectionLost: The socket is closed.
            ProblemError: `too_large`.
        """
        if not self.open:
            raise ConnectionLost("the socket is closed")
        request_id = self._next_id
        self._next_id = request_id + 1
        frame = dumps({"id": request_id, **fields}, binary=self._binary)
        if len(frame) > max_bytes:
            raise ProblemError("too_large", f"the request has {len(frame)} bytes; {max_bytes} are allowed")
        self._socket.send(frame, binary=self._binary)
        future: asyncio.Future[Reply] = self._loop.create_future()
        self._waiting[request_id] = (future, deadline)
        if self._tick_handle is None:
            self._heard_at = self._loop.time()
            self._tick_handle = self._loop.call_later(_TICK_S, self._tick)
        return future

    async def close(self) -> None:
        """Close the socket; everything that still waits fails with `ConnectionLost`."""
        self.open = False
        await self._socket.close()

    def _receive(self, data: bytes) -> None:
        self._heard_at = self._loop.time()
        if len(data) > LONG:
            task = self._loop.create_task(self._receive_long(data))
            self._reading.add(task)
            task.add_done_callback(self._reading.discard)
            return
        try:
            message = loads(data, binary=self._binary)
        except DecodeError:
            message = None
        self._take(message, data)

    async def _receive_long(self, data: bytes) -> None:
        """Parse a long message in pieces, so that other tasks of the loop do not wait."""
        try:
            message = await read_long(data, binary=self._binary)
        except DecodeError:
            message = None
        self._take(message, data)

    def _take(self, message: Any, data: bytes) -> None:
        try:
            request_id = message["id"]
        except (TypeError, KeyError):
            request_id = ""
        if request_id is None:
            return  # the problem of a frame with an unreadable id, which this client never sends
        if type(request_id) is not int:
            # Another protocol: later messages cannot be matched to requests.
            self.heard_nonsense = True
            self._socket.abort()
            return
        future, _ = self._waiting.pop(request_id, (None, 0.0))
        if future is None or future.done():
            return
        error = message.get("error")
        if error is not None:
            future.set_exception(ProblemError.from_problem(error))
            return
        plain = b"__nd__" not in data and b"__bytes__" not in data
        payload = message["ok"] if "ok" in message else message.get("results")
        future.set_result(Reply(payload, plain, self.process))

    def _hear(self) -> None:
        self._heard_at = self._loop.time()
        self._pinged_at = None

    def _tick(self) -> None:
        """Fail overdue requests, and check whether the peer is still alive."""
        now = self._loop.time()
        for request_id, (future, deadline) in list(self._waiting.items()):
            if future.done():  # its task was cancelled
                del self._waiting[request_id]
            elif now >= deadline:
                del self._waiting[request_id]
                future.set_exception(TimeoutError("the server did not answer in time"))
        if not self._waiting or not self.open:
            self._tick_handle = self._pinged_at = None
            return
        if self._pinged_at is not None and self._heard_at > self._pinged_at:
            self._pinged_at = None
        if self._pinged_at is None and now - self._heard_at > self._silence_s:
            self._pinged_at = now
            self._socket.ping()
        elif self._pinged_at is not None and now - self._pinged_at > self._pong_s:
            self._socket.abort()
        self._tick_handle = self._loop.call_later(_TICK_S, self._tick)

    def _fail_all(self, closed: asyncio.Future[str]) -> None:
        was_open, self.open = self.open, False
        if self._tick_handle is not None:
            self._tick_handle.cancel()
            self._tick_handle = None
        reason = "the client was closed" if closed.cancelled() else closed.result()
        waiting, self._waiting = self._waiting, {}
        for future, _ in waiting.values():
            if not future.done():
                future.set_exception(ConnectionLost(reason))
        if was_open and self.on_lost is not None:
            self.on_lost()
