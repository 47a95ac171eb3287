"""Fewer system calls for sockets that carry many sessions: answers made in one turn go out together.

uvicorn writes each message by itself, and for small messages that write is the dearest part of an answer. Where more
frames wait to be answered, what was framed is left with the framing instead, until the turn of the event loop ends.
"""

from typing import Any

from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.protocol import State

MORE = "rollgym.more"
"""In a message to send, says that another one follows at once."""

TRUSTED = "rollgym.trusted"
"""In the message to send with which it is known who asks: how many bytes a message of theirs may have."""

_MOST_COALESCED_BYTES = 65536


class CoalescingProtocol(WebSocketsSansIOProtocol):
    """uvicorn's protocol, which writes at once only if nothing waits to be answered."""

    _coalesced = 0
    _fragments: bytearray | None = None
    _is_trusted = False

    async def send(self, message: Any) -> None:
        """Send a message, at the end of this turn at the latest; all but plain messages is done as uvicorn does it.

        Raises:
            OSError: The client has gone, or the socket was closed to it, so that nobody hears it.
        """
        if not self._is_trusted and TRUSTED in message:
            self._is_trusted = True
            self.conn.max_message_size = max(self.conn.max_message_size or 0, message[TRUSTED])
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
            await super().send(message)
            if message["type"] == "websocket.http.response.body" and self.close_sent:
                # Otherwise uvicorn reports a handshake that was refused as an error of the application.
                self.handshake_complete = True
            return
        text = message.get("text")
        if text is not None:
            content = text.encode()
            self.conn.send_text(content)
        else:
            content = message["bytes"]
            self.conn.send_binary(content)
        if self.queue.empty() and MORE not in message:
            self._flush()
            return
        if not self._coalesced:
            self.loop.call_soon(self._flush)
        self._coalesced += len(content) + 1
        if self._coalesced > _MOST_COALESCED_BYTES:
            self._flush()

    def handle_cont(self, event: Any) -> None:
        """Take in a fragment; a message in a million of them takes no more memory than in one."""
        if self._fragments is None:
            self._fragments = bytearray().join(self.frames)
        self._fragments += event.data
        if event.fin:
            self.frames = [bytes(self._fragments)]
            self._fragments = None
            self.send_receive_event_to_app()

    def pause_writing(self) -> None:
        """Read no more from a peer that does not read: it would be answered without end, its pings first of all."""
        super().pause_writing()
        self.transport.pause_reading()

    def resume_writing(self) -> None:
        """Read on, unless it is the application that is behind."""
        super().resume_writing()
        if not self.read_paused:
            self.transport.resume_reading()

    async def receive(self) -> Any:
        """Give the next message; what was taken makes room for another only if the peer reads."""
        message = await super().receive()
        if not self.writable.is_set():
            self.transport.pause_reading()
        return message

    def _flush(self) -> None:
        self._coalesced = 0
        parts = self.conn.data_to_send()
        if parts and not self.transport.is_closing():
            self.transport.write(b"".join(parts))
