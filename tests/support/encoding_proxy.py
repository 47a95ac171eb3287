"""A TCP proxy before a node that cuts the connections of one encoding, and keeps those of the other."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

_BINARY = b"rollgym.v1.msgpack"


class EncodingProxy:
    """Passes connections on; those in MessagePack can be cut, and be kept from being made anew.

    Args:
        port: Where the node is.

    Attributes:
        url: Where the proxy is.
        takes_binary: While it is not set, new connections in MessagePack are accepted and not passed on.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._open: dict[asyncio.StreamWriter, asyncio.Task[None] | None] = {}
        self._binary: set[asyncio.StreamWriter] = set()
        self.url = ""
        self.takes_binary = asyncio.Event()
        self.takes_binary.set()

    def cut_binary(self) -> None:
        """End the connections in MessagePack, and take no others until `takes_binary` is set again."""
        self.takes_binary.clear()
        for writer in self._binary:
            writer.transport.abort()
        self._binary.clear()

    async def close(self) -> None:
        """End all connections."""
        self.takes_binary.set()
        for writer in self._open:
            writer.transport.abort()
        await asyncio.gather(*(serving for serving in self._open.values() if serving is not None))

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass on one connection."""
        self._open[writer] = asyncio.current_task()
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            head = await reader.readuntil(b"\r\n\r\n")
            if _BINARY in head:
                await self.takes_binary.wait()
                self._binary.add(writer)
            node, to_node = await asyncio.open_connection("127.0.0.1", self._port)
            to_node.write(head)
            await asyncio.gather(_pass_on(reader, to_node), _pass_on(node, writer))
        writer.close()


@asynccontextmanager
async def encoding_proxy(port: int) -> AsyncIterator[EncodingProxy]:
    """Run a proxy while the context is open."""
    proxy = EncodingProxy(port)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    async with server:
        proxy.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield proxy
        finally:
            await proxy.close()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()
