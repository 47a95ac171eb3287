"""A connection: requests with ids over one WebSocket, answered in any order.

The WebSocket is an asyncio protocol: messages go out in one write a loop turn and come in by call-back. The sans-I/O
core of `websockets` does the handshakes, and what is not a message of one frame. Its own asyncio connection hands
messages over through queues and context managers, which costs more CPU per message than all the rest of a client step.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Mapping
from contextlib import suppress
from http import HTTPStatus
from typing import Any, NamedTuple, cast
from urllib.parse import urlunsplit

from websockets.client import ClientProtocol
from websockets.exceptions import InvalidHandshake, InvalidURI
from websockets.frames import Frame, Opcode
from websockets.http11 import Response
from websockets.protocol import State
from websockets.typing import Subprotocol
from websockets.uri import parse_uri

from rollgym.clients.net.framing import BINARY, TEXT, FrameReader, masking_keys, to_server
from rollgym.clients.protocol.addresses import server_parts
from rollgym.clients.protocol.arrays import DecodeError
from rollgym.clients.protocol.errors import ProblemError
from rollgym.clients.protocol.frames import LONG, dumps, loads, read_long

MAX_MESSAGE_BYTES = 2**30
"""A message that is larger ends the connection, unless another limit is set."""

_CLOSE_TIMEOUT_S = 2.0
_END_OF_HEAD = b"\r\n\r\n"
_SCHEMES = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}


class ConnectionLost(ConnectionError):  # noqa: N818 - it says what happened, as its built-in base classes do
    """The socket is gone; its pending requests may or may not have been carried out."""


def socket_url(url: str) -> str:
    """Return the WebSocket address of a server given by its `http(s)://` or `ws(s)://` address.

    Raises:
        ValueError: The address is not one of these.
    """
    parts = server_parts(url, _SCHEMES)
    path = parts.path.rstrip("/").removesuffix("/v1/ws") + "/v1/ws"
    return urlunsplit((_SCHEMES[parts.scheme], parts.netloc, path, "", ""))


async def open_socket(
    url: str,
    *,
    headers: Mapping[str, str],
    subprotocol: str | None,
    timeout_s: float,
    address: str | None = None,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    on_message: Callable[[bytes], None] | None = None,
) -> WebSocket:
    """Open a WebSocket.

    Args:
        url: The address; its host name is used in the handshake and for TLS.
        headers: Headers of the handshake.
        subprotocol: The subprotocol to request, if any.
        timeout_s: How long it may take.
        address: The address to connect to instead of resolving the name.
        max_message_bytes: A larger message ends the connection.
        on_message: Called with each whole message, from the first on: the other side may send before it receives a
            request.

    Raises:
        ProblemError: The server answered the handshake with a problem.
        ConnectionError: No answer came, or the peer is not such a server.
        ValueError: The address is not one.
    """
    try:
        uri = parse_uri(url)
    except InvalidURI as error:
        raise ValueError(str(error)) from error
    loop = asyncio.get_running_loop()
    context = ssl.create_default_context() if uri.secure else None
    offered = None if subprotocol is None else [Subprotocol(subprotocol)]
    try:
        async with asyncio.timeout(timeout_s):
            _, connection = await loop.create_connection(
                lambda: WebSocket(
                    ClientProtocol(uri, subprotocols=offered, max_size=max_message_bytes),
                    headers,
                    on_message or _ignore,
                    max_message_bytes,
                ),
                address or uri.host,
                uri.port,
                ssl=context,
                server_hostname=uri.host if context is not None else None,
            )
            try:
                await connection.opened
            except BaseException:
                connection.abort()
                raise
    except TimeoutError as error:
        raise ConnectionLost(f"{url} did not answer in {timeout_s:.3g} s") from error
    except ConnectionError:
        raise
    except OSError as error:  # name resolution, unreachable networks, TLS
        raise ConnectionLost(f"{url}: {error}") from error
    if connection.subprotocol != subprotocol:
        connection.abort()
        raise ConnectionLost(f"{url} does not speak {subprotocol}")
    return connection


class WebSocket(asyncio.Protocol):
    """A client's end of one WebSocket; made by `open_socket`.

    Attributes:
        opened: Resolves when the handshake has succeeded.
        closed: Resolves, with the reason as a text, when nothing more can come.
        on_message: Called with each whole message.
        on_pong: Called when the other side answered a ping.
    """

    def __init__(
        self,
        protocol: ClientProtocol,
        headers: Mapping[str, str],
        on_message: Callable[[bytes], None],
        max_message_bytes: int,
    ) -> None:
        loop = asyncio.get_running_loop()
        self._loop = loop
        self._protocol = protocol
        self._headers = headers
        self._transport: asyncio.Transport | None = None
        self._flush_scheduled = False
        self._fragments: list[bytes] = []
        self._keys = masking_keys()
        self._response_end = b""
        self._reader = FrameReader(
            protocol,
            most_bytes=max_message_bytes,
            on_message=lambda _, message: self.on_message(message),
            pass_on=self._pass_on,
        )
        self.opened: asyncio.Future[None] = loop.create_future()
        self.closed: asyncio.Future[str] = loop.create_future()
        self.on_message = on_message
        self.on_pong: Callable[[], None] = _ignore

    @property
    def subprotocol(self) -> str | None:
        """The subprotocol that the handshake negotiated."""
        return self._protocol.subprotocol

    # -- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request of the handshake."""
        self._transport = cast("asyncio.Transport", transport)
        _keep_alive(transport.get_extra_info("socket"))
        request = self._protocol.connect()
        for name, value in self._headers.items():
            request.headers[name] = value
        self._protocol.send_request(request)
        self._flush()

    def data_received(self, data: bytes) -> None:
        """Read what came, and deliver complete messages."""
        if self._protocol.state is State.CONNECTING:
            data = self._take_response(data)
        self._reader.feed(data)

    def _take_response(self, data: bytes) -> bytes:
        """Take in the response to the handshake; return what came behind its head, which may be frames."""
        before = len(self._response_end)
        looked_at = self._response_end + data
        end = looked_at.find(_END_OF_HEAD)
        head = data if end < 0 else data[: end + len(_END_OF_HEAD) - before]
        self._response_end = looked_at[1 - len(_END_OF_HEAD) :]
        self._pass_on(head)
        rest = data[len(head) :]
        if rest and self._protocol.state is not State.OPEN:
            # The body of a refusal.
            self._pass_on(rest)
            return b""
        return rest

    def _pass_on(self, data: bytes) -> None:
        """Let the protocol read what is not a message of one frame."""
        self._protocol.receive_data(data)
        for event in self._protocol.events_received():
            if isinstance(event, Frame):
                self._receive(event)
            elif isinstance(event, Response):
                self._finish_handshake(event)
        self._flush()
        if self._protocol.parser_exc is not None:
            self._say_goodbye()

    def eof_received(self) -> None:
        """Let the framing see the end, then close."""
        self._protocol.receive_eof()
        for event in self._protocol.events_received():
            if isinstance(event, Response):
                self._finish_handshake(event)

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the waiters, and mark the connection as closed."""
        if self._protocol.state is not State.CLOSED:
            self._protocol.receive_eof()
        reason = str(exc) if exc is not None else self._close_reason()
        if not self.opened.done():
            error = self._protocol.handshake_exc
            self.opened.set_exception(ConnectionLost(f"the handshake failed: {error or reason}"))
        if not self.closed.done():
            self.closed.set_result(reason)

    # -- called by the owner

    def send(self, message: bytes, *, binary: bool) -> None:
        """Send one message at the end of this turn of the loop, together with all others.

        Raises:
            ConnectionLost: The socket is closed or closing.
        """
        if self._protocol.state is not State.OPEN:
            raise ConnectionLost("the socket is closed")
        self._protocol.writes.append(to_server(BINARY if binary else TEXT, message, next(self._keys)))
        self._flush_soon()

    def ping(self) -> None:
        """Send a ping to the other side."""
        if self._protocol.state is State.OPEN:
            self._protocol.send_ping(b"")
            self._flush_soon()

    async def close(self) -> None:
        """Close with the closing handshake, and without it if the other side does not answer soon."""
        if self._protocol.state is State.OPEN:
            self._flush()
            self._protocol.send_close(1000)
            self._flush()
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self.closed), _CLOSE_TIMEOUT_S)
        self.abort()

    def abort(self) -> None:
        """Close at once, without a closing handshake."""
        if self._transport is not None:
            self._transport.abort()

    # -- inside

    def _finish_handshake(self, response: Response) -> None:
        if self.opened.done():
            return
        error = self._protocol.handshake_exc
        if error is None:
            self.opened.set_result(None)
        else:
            self.opened.set_exception(_handshake_error(response, error))
            self.opened.exception()  # the waiter receives it; this avoids a warning if it has left

    def _receive(self, frame: Frame) -> None:
        opcode = frame.opcode
        if opcode is Opcode.PONG:
            self.on_pong()
            return
        if opcode is Opcode.CLOSE:
            self._say_goodbye()
            return
        if opcode not in (Opcode.TEXT, Opcode.BINARY, Opcode.CONT):
            return  # pings are answered by the framing itself
        if frame.fin and not self._fragments:
            self.on_message(cast("bytes", frame.data))
            return
        self._fragments.append(bytes(frame.data))
        if frame.fin:
            message = b"".join(self._fragments)
            self._fragments.clear()
            self.on_message(message)

    def _say_goodbye(self) -> None:
        """Note that nothing more can come or go; a peer may be slow to hang up, or never do so."""
        if not self.closed.done():
            self.closed.set_result(self._close_reason())
            self._loop.call_later(_CLOSE_TIMEOUT_S, self.abort)

    def _flush_soon(self) -> None:
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_scheduled = False
        transport = self._transport
        pieces = self._protocol.data_to_send()
        if not pieces or transport is None or transport.is_closing():
            return
        ends = pieces[-1] == b""  # the framing's mark for the end of writing
        transport.write(b"".join(pieces))
        if ends:
            transport.close()

    def _close_reason(self) -> str:
        goodbye = self._protocol.close_rcvd
        if goodbye is None:
            error = self._protocol.parser_exc
            broke = error is None or isinstance(error, EOFError)
            return "the connection broke" if broke else f"what came cannot be read: {error}"
        return f"closed by the server ({goodbye.code:d}{' ' + goodbye.reason if goodbye.reason else ''})"


def _ignore(*_: object) -> None:
    """Do nothing: the state before an owner is attached."""


def _keep_alive(sock: socket.socket | None) -> None:
    """Let the kernel notice a peer that vanished, also while this process is busy."""
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 6)):
        if hasattr(socket, name):  # they differ between platforms
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _handshake_error(response: Response, error: Exception) -> Exception:
    """Read the problem that a server refused the handshake with."""
    if response.status_code == HTTPStatus.REQUEST_TIMEOUT:
        # This process, or the network, stood still between connecting and sending. Nothing was refused.
        return ConnectionLost("the handshake failed: the request came too late (408)")
    try:
        problem = loads(bytes(response.body or b""), binary=False)
    except DecodeError:
        problem = None
    if isinstance(problem, dict) and "code" in problem:
        return ProblemError.from_problem(problem)
    if response.status_code in (401, 403):
        code = "unauthorized" if response.status_code == 401 else "forbidden"
        return ProblemError(code, f"the server refused the token ({response.status_code})")
    if isinstance(error, InvalidHandshake):
        return ConnectionLost(f"the handshake failed: {error}")
    return error


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
