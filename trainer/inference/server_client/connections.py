"""Connections to one server: HTTP/1.1, one call at a time on each, answers read whole.

httpx is not used for these: at every call it checks every connection of its pool, and much that no call to an
inference server needs, which is most of a turn's cost for a trainer. Answers are parsed by httptools, as in servers.
The progress of each answer is tracked, because a live server may begin one that never ends.
"""

import asyncio
from base64 import b64encode
from collections import deque
from collections.abc import Callable, Mapping
from urllib.parse import unquote, urlencode, urlsplit

import httptools
import httpx

from rollgym.trainer.inference.calls import HttpAnswer, HttpCall
from rollgym.trainer.inference.errors import MalformedReplyError


class ResponseProgress:
    """Tracks the progress of one answer, to detect that it has stalled.

    Args:
        held: Returns whether the server is paused: a paused server does not count as stalled.
        clock: Returns the time, in seconds.
    """

    def __init__(self, held: Callable[[], bool], clock: Callable[[], float]) -> None:
        self._held = held
        self._clock = clock
        self._since: float | None = None

    def begin(self) -> None:
        """Start the stall clock at the first byte of the answer or of its body; later bytes do not reset it."""
        if self._since is None:
            self._since = self._clock()

    def news(self) -> None:
        """Something new has come, such as a token."""
        self._since = self._clock()

    def wait(self) -> None:
        """What comes next may take its time: the first token of a stream waits for those of others."""
        self._since = None

    def stalled(self, after_s: float, *, steered: bool) -> bool:
        """Return whether nothing new has come for so long.

        Args:
            after_s: How long that is.
            steered: Whether a control call (pause, load and the like) is in flight: it may block all other work.
        """
        if self._since is None:
            return False
        if steered or self._held():
            self.news()
        return self._clock() - self._since >= after_s


class LostCallError(ConnectionError):
    """A call has no answer; it is unknown whether the server received it."""


class NotConnectedError(LostCallError):
    """The server cannot be reached; the call was not sent."""


class Connections:
    """Makes calls to a server, over a pool of keep-alive connections.

    Args:
        url: Its root.
        connect_s: How long it may take to be reached.
        keep_s: How long an idle connection is kept.
        largest: Bytes of an answer.
    """

    def __init__(self, url: str, *, connect_s: float, keep_s: float, largest: int) -> None:
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = httpx.create_ssl_context(trust_env=False) if parts.scheme == "https" else None
        self._prefix = parts.path.rstrip("/")
        self._common = {
            "Host": parts.netloc.rpartition("@")[2],
            "Accept": "*/*",
            "Accept-Encoding": "identity",
        }
        if parts.username is not None:
            user = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            self._common["Authorization"] = f"Basic {b64encode(user.encode()).decode()}"
        self._connect_s, self._keep_s, self._largest = connect_s, keep_s, largest
        self._idle: deque[_Connection] = deque()
        self._open: set[_Connection] = set()

    async def call(
        self,
        call: HttpCall,
        headers: Mapping[str, str],
        content: bytes | None,
        on_body: Callable[[bytes], None] | None = None,
        arrival: ResponseProgress | None = None,
    ) -> HttpAnswer:
        """Make a call; cancelling it closes its connection, by which the server notices.

        Args:
            call: What to call.
            headers: Beyond those of every call.
            content: The body.
            on_body: Called with parts of the answer's body as they arrive, if the status is a success.
            arrival: Notified of progress, for stall detection.

        Raises:
            NotConnectedError: If the server cannot be reached.
            LostCallError: If the connection broke, or the answer is not valid HTTP.
            MalformedReplyError: If the answer is too long.
        """
        sent = self._written(call, headers, content)
        connection = self._kept() or await self._connected()
        try:
            answer = await connection.exchange(sent, on_body, arrival)
        except BaseException:
            connection.close()
            raise
        if connection.reusable:
            connection.idle_since = asyncio.get_running_loop().time()
            self._idle.append(connection)
        else:
            connection.close()
        return answer

    async def close(self) -> None:
        """Close all connections; calls under way are lost."""
        self._idle.clear()
        for connection in list(self._open):
            connection.close()
        await asyncio.sleep(0)  # transports say a turn of the loop later that they are closed

    def _written(self, call: HttpCall, headers: Mapping[str, str], content: bytes | None) -> bytes:
        target = f"{self._prefix}{call.path}" + (f"?{urlencode(call.query)}" if call.query else "")
        own = {**self._common, **headers}
        if content is not None or call.method == "POST":
            own["Content-Length"] = str(len(content or b""))
        lines = [f"{call.method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in own.items())]
        head = "\r\n".join(lines)
        if head.count("\n") != len(lines) - 1:
            raise ValueError("a header of a call holds the end of a line")
        return head.encode("latin-1") + b"\r\n\r\n" + (content or b"")

    def _kept(self) -> "_Connection | None":
        """Take the most recently used connection, and close those that were idle for too long."""
        oldest = asyncio.get_running_loop().time() - self._keep_s
        while self._idle and (self._idle[0].idle_since < oldest or not self._idle[0].reusable):
            self._idle.popleft().close()
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable:
                return connection
            connection.close()
        return None

    async def _connected(self) -> "_Connection":
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_s):
                _, connection = await loop.create_connection(
                    lambda: _Connection(self._largest, self._open), self._host, self._port, ssl=self._tls
                )
        except TimeoutError as error:
            raise NotConnectedError(f"no connection within {self._connect_s:g} s") from error
        except OSError as error:
            raise NotConnectedError(str(error) or type(error).__name__) from error
        return connection


class _Connection(asyncio.Protocol):
    """One connection: sends a request, and gathers the answer to it.

    Args:
        largest: Bytes of an answer.
        those_open: The set that it is a member of while it is open.
    """

    def __init__(self, largest: int, those_open: "set[_Connection]") -> None:
        self.idle_since = 0.0
        self.reusable = False
        self._largest = largest
        self._those_open = those_open
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[HttpAnswer] | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._on_body: Callable[[bytes], None] | None = None
        self._arrival: ResponseProgress | None = None
        self._body = bytearray()
        self._length_is_told = self._has_head = False

    async def exchange(
        self, sent: bytes, on_body: Callable[[bytes], None] | None, arrival: ResponseProgress | None
    ) -> HttpAnswer:
        """Send a request and return the answer."""
        self._on_body, self._arrival = on_body, arrival
        if self._transport is None or self._transport.is_closing():
            raise LostCallError("the server closed the connection")
        self.reusable = False
        self._parser = httptools.HttpResponseParser(self)
        self._begin()
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(sent)
        return await self._answer

    def close(self) -> None:
        """Close it, whatever is under way."""
        self.reusable = False
        if self._transport is not None:
            self._transport.abort()

    def _begin(self) -> None:
        self._body = bytearray()
        self._length_is_told = self._has_head = False

    # -- what the event loop says

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport, and register as open."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._those_open.add(self)

    def data_received(self, data: bytes) -> None:
        """Read more of an answer; unsolicited data closes the connection."""
        if self._parser is None or self._answer is None or self._answer.done():
            self.close()
            return
        if self._arrival is not None and not self._has_head:
            self._arrival.begin()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(LostCallError(f"what the server sent is no HTTP: {error}"))
        if len(self._body) > self._largest:
            self._fail(MalformedReplyError(f"the answer has more than {self._largest} bytes"))

    def eof_received(self) -> None:
        """The server sends no more, which ends an answer that does not say how long it is."""
        if self._has_head and not self._length_is_told:
            self._end()
        self.close()

    def connection_lost(self, error: Exception | None) -> None:
        """Fail the call in flight, if any: it has no answer."""
        self._those_open.discard(self)
        self.reusable = False
        self._fail(LostCallError(str(error or "") or "the server closed the connection"))

    # -- what the parser says

    def on_header(self, name: bytes, value: bytes) -> None:
        """Note whether the header gives the length of the body."""
        self._length_is_told |= name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        """Note that the head is complete; a stream's first token may take its time."""
        self._has_head = True
        if self._arrival is not None and self._is_told():
            self._arrival.wait()

    def on_body(self, body: bytes) -> None:
        """A part of the body is read."""
        self._body += body
        if self._arrival is not None:
            self._arrival.begin()
        if self._on_body is not None and self._is_told():
            self._on_body(body)

    def on_message_complete(self) -> None:
        """An answer is read, or a word that it will come."""
        assert self._parser is not None
        assert self._answer is not None
        if self._answer.done():
            self.reusable = False  # a second answer to one request
            return
        if self._parser.get_status_code() < 200:
            self._begin()
            return
        self.reusable = self._parser.should_keep_alive()
        self._end()

    def _is_told(self) -> bool:
        """Whether the caller streams the body, and the status is a success."""
        return self._on_body is not None and self._parser is not None and self._parser.get_status_code() < 300

    def _end(self) -> None:
        if self._answer is not None and not self._answer.done() and self._parser is not None:
            self._answer.set_result(HttpAnswer(self._parser.get_status_code(), bytes(self._body)))

    def _fail(self, error: Exception) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)
        self.close()
