"""Sockets that carry many sessions: answers of one turn go out in one write, and input is parsed in slices.

uvicorn writes each message by itself, and for small messages that write is the most expensive part of an answer. If
more frames wait to be answered, the framed bytes are buffered instead, until the turn of the event loop ends.
"""

import asyncio
from collections import deque
from typing import Any, cast

from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.protocol import State

from rollgym.clients.net.framing import BINARY, TEXT, FrameReader, to_client
from rollgym.env_server.common.event_loop import Admissions
from rollgym.env_server.common.overload import Arrivals
from rollgym.env_server.http.transport.connection import SLICE_BYTES, ReadSlices

MORE = "rollgym.more"
"""In a message to send, says that another one follows at once."""

TRUSTED = "rollgym.trusted"
"""A key in the message that marks authentication: how many bytes a message of the client may have."""

AWAITS_TOKEN = "rollgym.awaits_token"
"""A key in the accept message: the client is not authenticated until a message says `TRUSTED`."""

ARRIVALS = "rollgym.arrivals"
"""The extension of a socket's scope that gives the arrival times of received frames."""

_MOST_COALESCED_BYTES = 65536
# Before authentication: fragments of the first message, pings and pongs, and messages after its refusal. After
# authentication: empty fragments of one message. Each costs as much as a frame with an operation.
_MOST_IDLE_FRAMES = 1000
_POLICY_VIOLATION = 1008


class _Messages:
    """What uvicorn needs of a queue, for one reader; that of asyncio does more, and takes twice as long a message."""

    __slots__ = ("_messages", "_waiter")

    def __init__(self) -> None:
        self._messages: deque[Any] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put_nowait(self, message: Any) -> None:
        """Add a message."""
        self._messages.append(message)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> Any:
        """Wait for the next message."""
        assert self._waiter is None, "a socket's messages have one reader"
        while not self._messages:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._messages.popleft()

    def empty(self) -> bool:
        """Whether no message waits."""
        return not self._messages

    def qsize(self) -> int:
        """How many messages wait."""
        return len(self._messages)


class CoalescingProtocol(WebSocketsSansIOProtocol):
    """uvicorn's protocol, which writes at once only if nothing waits to be answered.

    Args:
        *uvicorn: What uvicorn gives its protocols.
        admissions: In which turn of the loop frames are taken in.
        **more: What else uvicorn gives them.
    """

    _coalesced = 0
    _fragments: bytearray | None = None
    _is_trusted = False
    _awaits_token = False
    _idle_frames = 0
    _slices: ReadSlices | None = None
    _arrivals: Arrivals

    def __init__(self, *uvicorn: Any, admissions: Admissions | None = None, **more: Any) -> None:
        super().__init__(*uvicorn, **more)
        self._admissions = Admissions() if admissions is None else admissions
        self.queue = cast(Any, _Messages())
        self._reader = FrameReader(
            self.conn,
            most_bytes=self.config.ws_max_size,
            on_message=self._take_message,
            pass_on=self._pass_on,
        )

    def connection_made(self, transport: Any) -> None:
        """Start the queue's arrival times with the connection."""
        self._arrivals = Arrivals(self.queue.qsize)
        super().connection_made(transport)

    def handle_connect(self, event: Any) -> None:
        """Begin to serve a socket."""
        super().handle_connect(event)
        if not self.handshake_complete:
            cast(dict[str, Any], self.scope["extensions"])[ARRIVALS] = self._arrivals

    def data_received(self, data: bytes) -> None:
        """Feed received bytes to the parser, in slices if there are many."""
        if self._slices is None or not self._slices.are_left:
            if self.queue.empty():
                self._arrivals.come(len(data), self.transport)
            # To put off a few frames would cost as much as to take them in: they wait before they are answered.
            if len(data) <= SLICE_BYTES:
                self._feed(data)
                return
        if self._slices is None:
            self._slices = ReadSlices(
                *(self._admissions, self.transport),
                feed=self._feed,
                is_over=lambda: self.disconnected or self.transport.is_closing(),
                has_to_wait=lambda: False,
                reads_on=self._reads_on,
            )
        self._slices.take(data)

    def _feed(self, data: bytes) -> None:
        if self.handshake_initiated:
            self._reader.feed(data)
        else:
            # The head of the handshake, whole and alone.
            super().data_received(data)

    def _pass_on(self, data: bytes) -> None:
        """Let uvicorn and the protocol read what is not a message of one frame."""
        if not self.transport.is_closing():
            super().data_received(data)

    def _take_message(self, opcode: int, content: bytes) -> None:
        """Take in a message of one frame."""
        self.frames = [content]
        self.curr_msg_data_type = "text" if opcode == TEXT else "bytes"
        self.send_receive_event_to_app()

    def connection_lost(self, exc: Exception | None) -> None:
        """Release what belongs to the connection."""
        super().connection_lost(exc)
        if self._slices is not None:
            self._slices.drop()

    async def send(self, message: Any) -> None:
        """Send a message, at the end of this turn at the latest; all but plain messages is done as uvicorn does it.

        Raises:
            OSError: The client has disconnected, or the server has closed the socket.
        """
        if not self._is_trusted and TRUSTED in message:
            self._is_trusted, self._awaits_token = True, False
            self._allow(message[TRUSTED])
        if self.close_sent and message["type"] in ("websocket.send", "websocket.close"):
            # To uvicorn that is an error of the application, which may not know yet that it has closed the socket.
            raise ClientDisconnected
        if (
            message["type"] != "websocket.send"
            or self.conn.state is not State.OPEN
            or self.close_sent
            or self.disconnected
            or not self.writable.is_set()
        ):
            self._awaits_token = self._awaits_token or AWAITS_TOKEN in message
            await super().send(message)
            if message["type"] == "websocket.http.response.body" and self.close_sent:
                # Otherwise uvicorn reports a handshake that was refused as an error of the application.
                self.handshake_complete = True
            return
        text = message.get("text")
        frame = to_client(BINARY, message["bytes"]) if text is None else to_client(TEXT, text.encode())
        self.conn.writes.append(frame)
        if self.queue.empty() and MORE not in message:
            self._flush()
            return
        if not self._coalesced:
            self.loop.call_soon(self._flush)
        self._coalesced += len(frame)
        if self._coalesced > _MOST_COALESCED_BYTES:
            self._flush()

    def _allow(self, most_bytes: int) -> None:
        """Accept messages of so many bytes, if fewer were accepted."""
        self._reader.most_bytes = most_bytes = max(self._reader.most_bytes, most_bytes)
        # `websockets` has called it `max_message_size` since version 16.
        setattr(
            self.conn,
            "max_message_size" if hasattr(self.conn, "max_message_size") else "max_size",
            most_bytes,
        )

    def handle_cont(self, event: Any) -> None:
        """Take in a fragment; a message in a million of them takes no more memory than in one."""
        if self._fragments is None:
            self._fragments = bytearray().join(self.frames)
        self._fragments += event.data
        if self._awaits_token or not event.data:
            self._count_idle_frame()
        if event.fin:
            self._idle_frames = 0 if self._is_trusted else self._idle_frames
            self.frames = [bytes(self._fragments)]
            self._fragments = None
            self.send_receive_event_to_app()

    def handle_text(self, event: Any) -> None:
        """Take in a text that is not read as messages mostly are."""
        super().handle_text(event)
        self._count_after_refusal()

    def handle_bytes(self, event: Any) -> None:
        """Take in bytes that are not read as messages mostly are."""
        super().handle_bytes(event)
        self._count_after_refusal()

    def handle_ping(self) -> None:
        """Answer a ping with a pong."""
        super().handle_ping()
        if self._awaits_token:
            self._count_idle_frame()

    def handle_pong(self, event: Any) -> None:
        """Take note of a pong."""
        super().handle_pong(event)
        if self._awaits_token:
            self._count_idle_frame()

    def _count_after_refusal(self) -> None:
        """Count a message of a client without a token that was told so: a few may have been on their way."""
        if self._awaits_token and self.close_sent:
            self._count_idle_frame()

    def _count_idle_frame(self) -> None:
        self._idle_frames += 1
        if self._idle_frames > _MOST_IDLE_FRAMES and not self.transport.is_closing():
            self.conn.fail(_POLICY_VIOLATION, "too many frames without content")
            self.transport.write(b"".join(self.conn.data_to_send()))
            self.close_sent = True
            self.transport.close()

    def pause_writing(self) -> None:
        """Read no more from a peer that does not read: it would be answered without end, its pings first of all."""
        super().pause_writing()
        self.transport.pause_reading()

    def resume_writing(self) -> None:
        """Read on, unless it is the application that is behind."""
        super().resume_writing()
        self._arrivals.excuse()
        if self._reads_on():
            self.transport.resume_reading()

    def _reads_on(self) -> bool:
        """Whether more may be read."""
        left = self._slices is not None and self._slices.are_left
        return not (self.read_paused or left) and self.writable.is_set()

    async def receive(self) -> Any:
        """Return the next message; a received message makes room for another only if the peer reads."""
        message = await self.queue.get()
        if self.queue.empty():
            self._arrivals.read_on()
            if self.read_paused:
                # uvicorn has stopped to read when the message came, and its own method reads on in any case.
                self.read_paused = False
                if self._reads_on():
                    self.transport.resume_reading()
        return message

    def _flush(self) -> None:
        self._coalesced = 0
        parts = self.conn.data_to_send()
        if parts and not self.transport.is_closing():
            self.transport.write(b"".join(parts))
