"""A proxy that gives each HTTP request, and each WebSocket, to one of several servers at random."""

import asyncio
import contextlib
import random
from collections.abc import Sequence

_BAD_GATEWAY = b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 0\r\n\r\n"
_TOO_LONG_S = 60.0


class SpreadingProxy:
    """Listens on a free port of this machine.

    Args:
        ports: Those of the servers.
        chance: An own stream of random numbers.
    """

    def __init__(self, ports: Sequence[int], chance: random.Random) -> None:
        self._ports = ports
        self._chance = chance
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[None]] = set()
        self.requests = [0] * len(ports)

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aenter__(self) -> "SpreadingProxy":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                while await self._pass_one(reader, writer):
                    pass
        finally:
            self._serving.discard(task)
            writer.close()

    async def _pass_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Pass one request on; whether another one may follow."""
        head = await reader.readuntil(b"\r\n\r\n")
        chosen = self._chance.randrange(len(self._ports))
        self.requests[chosen] += 1
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._ports[chosen])
        except ConnectionError:
            await reader.readexactly(_length(head))
            writer.write(_BAD_GATEWAY)
            return True
        try:
            back.write(head)
            if b"\r\nupgrade:" in head.lower():
                await self._tunnel(reader, writer, there, back)
                return False
            back.write(await reader.readexactly(_length(head)))
            try:
                async with asyncio.timeout(_TOO_LONG_S):
                    answer = await there.readuntil(b"\r\n\r\n")
                    answer += await there.readexactly(_length(answer))
            except (ConnectionError, asyncio.IncompleteReadError, TimeoutError):
                # The server died with the request, which may have been done.
                answer = _BAD_GATEWAY
            writer.write(answer)
            await writer.drain()
            return True
        finally:
            back.close()

    @staticmethod
    async def _tunnel(
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        there: asyncio.StreamReader,
        back: asyncio.StreamWriter,
    ) -> None:
        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            with contextlib.suppress(ConnectionError):
                while data := await source.read(65536):
                    sink.write(data)
                    await sink.drain()
            sink.close()

        await asyncio.gather(pump(reader, back), pump(there, writer))


def _length(head: bytes) -> int:
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    return 0
