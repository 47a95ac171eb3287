"""HTTP connections that cannot be held for nothing: bounds on heads, on the time of a request, and on connections.

uvicorn leaves these to a proxy in front. A server that is reached directly would otherwise keep, for ever, each
connection that sends half a request.
"""

import asyncio
from functools import partial
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from env_server.settings import Settings

_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
_TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class _HeadTooLarge(Exception):  # noqa: N818 - never leaves the parser
    """The head of a request is over the limit."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol, with bounds.

    Args:
        settings: The bounds.
        **uvicorn: What uvicorn gives its protocols.
    """

    def __init__(self, settings: Settings, **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self._max_connections = settings.max_connections
        self._max_head = settings.max_header_bytes
        self._patience_s = settings.request_timeout_s
        self._head = 0
        self._in_head = True
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take a connection, or close it where there are too many."""
        super().connection_made(cast(asyncio.Transport, transport))
        if len(self.connections) > self._max_connections:
            self.transport.close()
            return
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Let go of the connection."""
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take in a part of a request."""
        if self._in_head:
            # A part of a header that has not ended is kept by the parser, and shows in no callback.
            self._head += len(data)
            super().data_received(data)
            if self._in_head and self._head > self._max_head and not self.transport.is_closing():
                self.send_400_response("")
        else:
            super().data_received(data)

    def handle_websocket_upgrade(self) -> None:
        """Hand the connection on; the socket has time limits of its own."""
        self._stop_waiting()
        super().handle_websocket_upgrade()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no request, and a head that is too large."""
        if self._head > self._max_head:
            self.transport.write(_TOO_LARGE)
            self.transport.close()
        else:
            super().send_400_response(msg)

    # -- what the parser tells -----------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._in_head = True
        if self._deadline is None:
            self._wait()

    def on_headers_complete(self) -> None:
        """A head is whole."""
        self._head = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if self._head > self._max_head:
            raise _HeadTooLarge
        self._head = 0
        self._in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """A request is whole."""
        self._in_head = True
        self._stop_waiting()
        super().on_message_complete()

    # -- the time ------------------------------------------------------------------------------------------------

    def _wait(self) -> None:
        self._deadline = self.loop.call_later(self._patience_s, self._too_slow)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_slow(self) -> None:
        self._deadline = None
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete and not cycle.more_body:
            # A request before this one is still being answered, and this one would have to wait anyway.
            self._wait()
            return
        if self._in_head or not cycle.response_started:
            self.transport.write(_TOO_SLOW)
        self.transport.close()


def http_protocol(settings: Settings) -> type[asyncio.Protocol]:
    """The protocol as uvicorn takes it."""
    return cast(type[asyncio.Protocol], partial(BoundedHttpProtocol, settings))
