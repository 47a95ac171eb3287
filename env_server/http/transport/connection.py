"""HTTP connections that cannot be held for nothing: bounds on heads, on the time of a request, and on connections.

uvicorn leaves these to a proxy in front. A server that is reached directly would otherwise keep, for ever, each
connection that sends half a request. What a connection receives is parsed in slices, so that a megabyte of tiny
requests or frames, which the event loop delivers as one, does not block the others for seconds.
"""

import asyncio
import logging
import re
import resource
import time
from collections.abc import Callable, Sequence
from functools import partial
from http import HTTPStatus
from time import perf_counter
from typing import Any, NamedTuple, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from websockets.datastructures import Headers
from websockets.http11 import Request
from websockets.server import ServerProtocol

from rollgym.clients.protocol.errors import ProblemError
from rollgym.clients.protocol.frames import dumps
from rollgym.env_server.common.event_loop import SLICE_S, Admissions
from rollgym.env_server.common.negotiation import PROBLEM_MEDIA_TYPE
from rollgym.env_server.common.settings import MessageSettings
from rollgym.env_server.http.transport.unread_answers import UnreadAnswers

_SPARE = 8
_TOLD_AGAIN_S = 60.0
SLICE_BYTES = 8192
"""As many bytes are looked at without a look at the clock."""
CAME = "rollgym.came"
"""Where a request's scope says when it was read, on the clock of `perf_counter`."""
_OF_BODIES = frozenset({b"content-length", b"transfer-encoding"})
# A name or an address, in brackets if it has colons, and a port (RFC 3986); text before an @ would be a user.
_HOST = re.compile(rb"[A-Za-z0-9._~!$&'()*+,;=%:\[\]-]*")
# How long incoming bytes are read after the answer, as nginx does: closing the connection with unread bytes resets it,
# and a client that still sends may then lose the answer.
_LINGER_S = 5.0
_LINGER_BYTES = 4 * 1024 * 1024

_log = logging.getLogger(__name__)


class DescriptorWatch:
    """Looks at the descriptor of each new connection, and says when it is one of the last."""

    def __init__(self) -> None:
        self._told_until = 0.0

    def look(self, descriptor: int) -> None:
        """Check a new descriptor: the kernel assigns the lowest free number."""
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if limit == resource.RLIM_INFINITY or descriptor < limit - _SPARE:
            return
        now = time.monotonic()
        if now >= self._told_until:
            self._told_until = now + _TOLD_AGAIN_S
            _log.error(
                "of %d file descriptors hardly any are left, and without them connections are reset: raise the limit "
                "(ulimit -n), or lower max_connections",
                limit,
            )


class ReadSlices:
    """The data of one connection that was received but not yet parsed.

    Args:
        admissions: In which turn of the loop data is taken in.
        transport: The connection; nothing more is read from it while there is data.
        feed: Parses a slice.
        is_over: Whether all further data is discarded.
        has_to_wait: Whether the parsed requests must be answered first; `go_on` is called then.
        reads_on: Whether to read more from the connection once all data is parsed.
    """

    def __init__(
        self,
        admissions: Admissions,
        transport: asyncio.Transport,
        *,
        feed: Callable[[bytes], None],
        is_over: Callable[[], bool],
        has_to_wait: Callable[[], bool],
        reads_on: Callable[[], bool],
    ) -> None:
        self._admissions = admissions
        self._transport = transport
        self._feed = feed
        self._is_over = is_over
        self._has_to_wait = has_to_wait
        self._reads_on = reads_on
        self._data = b""
        self._at = 0
        self._is_scheduled = False

    @property
    def are_left(self) -> bool:
        """Whether there is data that was not taken in yet."""
        return self._at < len(self._data)

    def take(self, data: bytes) -> None:
        """Parse data, or keep it until earlier data is parsed."""
        if self.are_left:
            self._data = self._data[self._at :] + data
            self._at = 0
            self._transport.pause_reading()
            return
        self._data, self._at = data, 0
        if self._admissions.are_open():
            self._take_slices()
        else:
            self.go_on()

    @property
    def are_in_line(self) -> bool:
        """Whether it is this server that is behind with data that was received."""
        return self._is_scheduled

    def go_on(self) -> None:
        """Take in what is left, at the next turn of the loop that has time for it."""
        if self.are_left and not self._is_scheduled:
            self._is_scheduled = True
            self._transport.pause_reading()
            self._admissions.call(self._next_turn)

    def drop(self) -> None:
        """Discard the data that remains."""
        self._data, self._at = b"", 0

    def _next_turn(self) -> None:
        self._is_scheduled = False
        if not self.are_left:
            return
        if self._is_over():
            self.drop()
        elif not self._has_to_wait() and self._take_slices() and self._reads_on():
            self._transport.resume_reading()

    def _take_slices(self) -> bool:
        """Take in slices, as long as it may take; whether all is taken in, and more may come."""
        end = perf_counter() + SLICE_S
        while self.are_left:
            piece = self._data[self._at : self._at + SLICE_BYTES]
            self._at += len(piece)
            self._feed(piece)
            if self._is_over():
                self.drop()
                return False
            if self._has_to_wait():
                if self.are_left:
                    self._transport.pause_reading()
                return not self.are_left
            if perf_counter() >= end:
                self.go_on()
                return not self.are_left
        self.drop()
        return True


class _Refusal(NamedTuple):
    """Why a request is not one that is answered."""

    status: HTTPStatus
    code: str
    detail: str

    def message(self) -> bytes:
        """The answer after which the connection ends."""
        problem = {**ProblemError(self.code, self.detail).to_problem(), "status": self.status.value}
        body = dumps(problem, binary=False)
        head = (
            f"HTTP/1.1 {self.status.value} {self.status.phrase}\r\nconnection: close\r\n"
            f"content-type: {PROBLEM_MEDIA_TYPE}\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


_NO_REQUEST = _Refusal(HTTPStatus.BAD_REQUEST, "invalid_request", "this is no request of HTTP/1.1")
_TOO_SLOW = _Refusal(
    HTTPStatus.REQUEST_TIMEOUT, "invalid_request", "the request did not come to its end in time"
)


class _Refused(Exception):  # noqa: N818 - never leaves the parser
    """A request is refused because of its head."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol, with bounds.

    Args:
        settings: The bounds.
        descriptors: Says when hardly any are left.
        admissions: In which turn of the loop requests are taken in.
        **uvicorn: What uvicorn gives its protocols.
    """

    def __init__(
        self, settings: MessageSettings, descriptors: DescriptorWatch, admissions: Admissions, **uvicorn: Any
    ) -> None:
        super().__init__(**uvicorn)
        self._descriptors = descriptors
        self._admissions = admissions
        self._came = 0.0
        self._max_connections = settings.max_connections
        self._max_head = settings.max_header_bytes
        self._patience_s = settings.request_timeout_s
        self._head = 0
        self._in_head = True
        self._unwanted = 0
        self._around_body = 0
        self._answered: RequestResponseCycle | None = None
        self._unread: UnreadAnswers | None = None
        self._refusal: _Refusal | None = None
        self._ends = False
        self._is_last = False
        self._slices: ReadSlices | None = None
        self._is_over = False
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Accept a connection, or close it if there are too many."""
        super().connection_made(cast(asyncio.Transport, transport))
        if len(self.connections) > self._max_connections:
            self.transport.close()
            return
        if (connection := transport.get_extra_info("socket")) is not None:
            self._descriptors.look(connection.fileno())
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Release what belongs to the connection."""
        self._stop_waiting()
        self._is_over = True
        if self._unread is not None:
            self._unread.stop()
        if self._answered is not None and self._answered is not self.cycle:
            # uvicorn tells the request that came last, which may still wait for this one.
            self._answered.disconnected = True
            self._answered.message_event.set()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Write no more until the peer reads, which it is not waited for without end."""
        super().pause_writing()
        self._watch_unread()

    def resume_writing(self) -> None:
        """Write again: the peer has read."""
        super().resume_writing()
        if self._unread is not None:
            self._unread.resumed()

    def data_received(self, data: bytes) -> None:
        """Take in what came: parts of requests."""
        if self._slices is None or not self._slices.are_left:
            if len(data) <= SLICE_BYTES and self._admissions.are_open():
                self._came = self._admissions.admitted_at
                self._take_part(data)
                return
            self._came = perf_counter()
        if self._slices is None:
            self._slices = ReadSlices(
                *(self._admissions, self.transport),
                feed=self._take_part,
                is_over=lambda: self._is_over or self.transport.is_closing(),
                has_to_wait=lambda: bool(self.pipeline),
                reads_on=lambda: not self.flow.read_paused,
            )
        self._slices.take(data)

    def _take_part(self, data: bytes) -> None:
        """Take in a part of a request, or several requests."""
        if self._in_head:
            # A part of a header that has not ended is kept by the parser, and shows in no callback.
            self._head += len(data)
            super().data_received(data)
            if self._in_head and self._head > self._max_head and not self.transport.is_closing():
                self.send_400_response("")
            return
        if self.cycle.response_complete:
            self._unwanted += len(data)
            if self._unwanted > _LINGER_BYTES:
                self.transport.close()
                return
        self._around_body += len(data)
        super().data_received(data)
        if self._around_body > self._max_head and not (self._in_head or self.transport.is_closing()):
            self._refuse_around_body()

    def _refuse_around_body(self) -> None:
        """Refuse a body with too much around it: the lines of its chunks, and the headers behind the last one."""
        if self.cycle.response_started:
            self.transport.close()
            return
        limit = f"what is sent around the body of a request may have {self._max_head} bytes"
        self._refuse(_Refusal(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "too_large", limit))

    def handle_websocket_upgrade(self) -> None:
        """Hand the connection on; the socket has time limits of its own."""
        self._stop_waiting()
        if self._unread is not None:
            self._unread.stop()
        self._is_over = True
        # The handshake may have waited for its turn, and nothing was read meanwhile.
        self.transport.resume_reading()
        super().handle_websocket_upgrade()

    def send_400_response(self, msg: str) -> None:
        """Refuse malformed requests and heads that are too large; earlier requests are answered first."""
        if self._head > self._max_head:
            limit = f"the head of a request may have {self._max_head} bytes"
            self._refusal = _Refusal(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "too_large", limit)
        self._ends = True
        cycle = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body:
            self._refuse(self._refusal or _NO_REQUEST)

    def on_response_complete(self) -> None:
        """Start the next request, or close, once a response is complete."""
        if self.pipeline:
            self._answered, _ = self.pipeline[-1]
        super().on_response_complete()
        if self.transport.get_write_buffer_size():
            self._watch_unread()
        if self._slices is not None:
            # What was sent with the request before it has waited for that first.
            self._came = perf_counter()
            if not self.pipeline:
                self._slices.go_on()
        if not self._in_head and self.cycle.response_complete:
            # The rest of the request's body is discarded.
            self._stop_waiting()
            self._wait(min(_LINGER_S, self._patience_s))
        if self._ends and (self.cycle is None or self.cycle.response_complete):
            self._refuse(self._refusal or _NO_REQUEST)

    def _watch_unread(self) -> None:
        if self._unread is None:
            flow = self.flow
            self._unread = UnreadAnswers(self.transport, self._patience_s, lambda: flow.write_paused)
        self._unread.watch()

    def _refuse(self, refusal: _Refusal) -> None:
        if not self.transport.is_closing():
            if not self._is_last:
                self.transport.write(refusal.message())
            self.transport.close()

    # -- what the parser tells -----------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """Start the deadline of a new request."""
        super().on_message_begin()
        cast(dict[str, Any], self.scope)[CAME] = self._came
        self._in_head = True
        if self._deadline is None:
            self._wait()

    def on_headers_complete(self) -> None:
        """Check a complete head, and refuse it if it is invalid."""
        self._head = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if self._head > self._max_head:
            raise _Refused
        self._refusal = _wrong_with(self.parser.get_http_version(), self.headers)
        if self._refusal is None and self.parser.should_upgrade() and self._should_upgrade():
            self._refusal = _wrong_with_upgrade(self.parser.get_method(), self.url, self.headers)
        if self._refusal is not None:
            raise _Refused
        self._head = self._unwanted = self._around_body = 0
        self._in_head = False
        before = self.cycle
        is_first = before is None or before.response_complete
        super().on_headers_complete()
        if is_first:
            self._answered = self.cycle
        # A handshake begins no cycle.
        if self.cycle is not before and not self.cycle.keep_alive:
            self.cycle.transport = cast(asyncio.Transport, _LastAnswer(self.transport, self._close_in_time))

    def on_body(self, body: bytes) -> None:
        """Take in a part of a body."""
        self._around_body = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Stop the deadline, since the whole request has arrived."""
        self._in_head = True
        self._stop_waiting()
        super().on_message_complete()
        if self._is_last:
            self.transport.close()

    def _close_in_time(self) -> None:
        """Close the connection after its last answer, once the discarded rest of the request has arrived."""
        if self._in_head or self.transport.is_closing():
            self.transport.close()
            return
        self._is_last = True
        if self.transport.can_write_eof():
            self.transport.write_eof()

    # -- the time ------------------------------------------------------------------------------------------------

    def _wait(self, patience_s: float | None = None) -> None:
        patience_s = self._patience_s if patience_s is None else patience_s
        self._deadline = self.loop.call_later(patience_s, self._too_slow)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_slow(self) -> None:
        self._deadline = None
        if self._slices is not None and self._slices.are_in_line:
            self._wait()
            return
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete and not cycle.more_body:
            # A request before this one is still being answered, and this one would have to wait anyway.
            self._wait()
            return
        if self._in_head or not cycle.response_started:
            self._refuse(_TOO_SLOW)
        self.transport.close()


class _LastAnswer:
    """The transport of the last request on a connection: it closes once the unread rest of that request has arrived.

    Closing a connection while the client still sends resets it, and the client may then lose the answer.
    """

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self.write = transport.write
        self.is_closing = transport.is_closing
        self.close = close


def _wrong_with(version: str, headers: Sequence[tuple[bytes, bytes]]) -> _Refusal | None:
    """The fault of a request's head that other HTTP parsers could read differently, if it has one."""
    hosts = 0
    codings = []
    for name, value in headers:
        if name == b"host":
            hosts += 1
            if _HOST.fullmatch(value.strip()) is None:
                return _NO_REQUEST._replace(detail="a Host header has a name and a port, and nothing else")
        elif name == b"transfer-encoding":
            codings.append(value.strip().lower())
    if hosts > 1 or (not hosts and version != "1.0"):
        return _NO_REQUEST._replace(detail=f"a request has one Host header, and this one has {hosts}")
    if codings and (codings != [b"chunked"] or version == "1.0"):
        return _NO_REQUEST._replace(detail="the only Transfer-Encoding here is chunked, of HTTP/1.1")
    return None


def _wrong_with_upgrade(method: bytes, url: bytes, headers: Sequence[tuple[bytes, bytes]]) -> _Refusal | None:
    """The fault of a handshake that the socket would answer in plain text, or never, if it has one."""
    if method != b"GET":
        return _NO_REQUEST._replace(detail="a WebSocket is opened with GET")
    if [value.strip() for name, value in headers if name == b"sec-websocket-version"] != [b"13"]:
        return _NO_REQUEST._replace(detail="a WebSocket is opened with Sec-WebSocket-Version: 13")
    if sum(name == b"sec-websocket-key" for name, _ in headers) != 1:
        return _NO_REQUEST._replace(detail="a WebSocket is opened with one Sec-WebSocket-Key")
    if any(name in _OF_BODIES and value.strip() != b"0" for name, value in headers):
        return _NO_REQUEST._replace(detail="a WebSocket is opened without a body")
    said = Headers([(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers])
    answer = ServerProtocol().accept(Request(url.decode("latin-1"), said))
    if answer.status_code != HTTPStatus.SWITCHING_PROTOCOLS:
        return _NO_REQUEST._replace(detail=(answer.body or b"").decode(errors="replace").strip())
    return None


def http_protocol(settings: MessageSettings, admissions: Admissions) -> type[asyncio.Protocol]:
    """The protocol as uvicorn takes it."""
    return cast(type[asyncio.Protocol], partial(BoundedHttpProtocol, settings, DescriptorWatch(), admissions))
