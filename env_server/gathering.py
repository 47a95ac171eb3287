"""Fewer system calls for sockets that carry many sessions: answers made in one turn go out together.

uvicorn writes each message by itself, and for small messages that write is the dearest part of an answer. Where more
frames wait to be answered, what is written is gathered instead, until the turn of the event loop ends.
"""

import asyncio
from typing import Any, cast

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

_MOST_GATHERED_BYTES = 65536


class GatheringProtocol(WebSocketsSansIOProtocol):
    """uvicorn's protocol, on a transport that gathers what is written."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        gathering = GatheringTransport(cast("asyncio.Transport", transport), self.queue)
        super().connection_made(cast("asyncio.Transport", gathering))


class GatheringTransport:
    """A transport that writes at once only if nothing waits to be answered.

    Args:
        transport: Where it goes in the end; all but writing and closing is that transport's.
        waiting: Messages that came and were not yet taken.
    """

    def __init__(self, transport: asyncio.Transport, waiting: "asyncio.Queue[Any]") -> None:
        self._transport = transport
        self._waiting = waiting
        self._loop = asyncio.get_running_loop()
        self._parts: list[bytes] = []
        self._size = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Write, at the end of this turn at the latest."""
        parts = self._parts
        if not parts and self._waiting.empty():
            self._transport.write(data)
            return
        if not parts:
            self._loop.call_soon(self._flush)
        parts.append(data)
        self._size += len(data)
        if self._size > _MOST_GATHERED_BYTES or self._waiting.empty():
            self._flush()

    def close(self) -> None:
        """Close when all is written."""
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._parts:
            data = b"".join(self._parts)
            self._parts.clear()
            self._size = 0
            if not self._transport.is_closing():
                self._transport.write(data)
