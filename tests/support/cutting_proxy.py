"""A TCP proxy between a client and a server that loses what the server answers, in the ways of real networks."""

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Literal
from urllib.parse import urlsplit

Fault = Literal["none", "unsent", "headless", "half", "500", "502", "429", "503", "leaves", "silent"]
"""What becomes of a request: passed on and answered; never passed on; or answered, and of the answer nothing, or half,
arrives before the connection is reset; or it is answered, and the proxy says an error in its place. `leaves` says
nothing until the client has gone, and then leaves the server, too; `silent` stays with the server."""


class CuttingProxy:
    """Passes each request on over a connection of its own, with the fault that is its turn.

    Args:
        target: The server's address.
        faults: Of the requests in order; the rest have none.
    """

    def __init__(self, target: str, faults: Sequence[Fault]) -> None:
        self._target = urlsplit(target)
        self._faults = list(faults)
        self.requests: list[bytes] = []
        self.arrived = asyncio.Condition()

    async def wait_for(self, count: int) -> None:
        """Wait until so many requests have come."""
        async with self.arrived:
            await self.arrived.wait_for(lambda: len(self.requests) >= count)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass on one request and close."""
        try:
            await self._pass_on(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client, or the server, has gone
        finally:
            writer.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        lines = head.split(b"\r\n")
        length = next((int(line[15:]) for line in lines if line.lower().startswith(b"content-length:")), 0)
        body = await reader.readexactly(length)
        fault = self._faults.pop(0) if self._faults else "none"
        async with self.arrived:
            self.requests.append(head)
            self.arrived.notify_all()
        if fault == "unsent":
            _reset(writer)
            return
        kept = [line for line in lines if not line.lower().startswith(b"connection:")]
        kept.insert(1, b"Connection: close")
        server, to_server = await asyncio.open_connection(self._target.hostname, self._target.port)
        try:
            to_server.write(b"\r\n".join(kept) + body)
            if fault == "leaves":
                await reader.read()  # returns when the client has gone
                return
            if fault == "none":
                while part := await server.read(65536):
                    writer.write(part)
                    await writer.drain()
                return
            answer = await server.read(-1)
        finally:
            to_server.close()
        if fault == "silent":
            await reader.read()
        elif fault in ("500", "502", "503", "429"):
            further = "retry-after-ms: 1\r\ncontent-length: 2\r\nconnection: close"
            writer.write(f"HTTP/1.1 {fault} No\r\n{further}\r\n\r\n{{}}".encode())
            await writer.drain()
        else:
            head, _, body = answer.partition(b"\r\n\r\n")
            assert b" 200 " in head.split(b"\r\n")[0]
            if fault == "half":
                writer.write(head + b"\r\n\r\n" + body[: len(body) // 2])
                await writer.drain()
            _reset(writer)


def _reset(writer: asyncio.StreamWriter) -> None:
    """Have the client's kernel told that the connection is no more, without a proper end."""
    raw = writer.get_extra_info("socket")
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@asynccontextmanager
async def cutting_proxy(target: str, faults: Sequence[Fault]) -> AsyncIterator[tuple[str, CuttingProxy]]:
    """Run a proxy while the context is open, and give its address."""
    proxy = CuttingProxy(target, faults)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}", proxy
