"""Those who send too much, too little or the same again, most without a token, and what a server owes to each."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress

from tests.support.patience import Patience

_PATIENCE_S = 25.0
_HANDSHAKE = (
    b"GET /v1/ws HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
_BEGUN = b"\x01\x80\0\0\0\0"
_FRAMES = {
    "empty fragments": b"\x00\x80\0\0\0\0",
    "fragments of a byte": b"\x00\x81\0\0\0\0 ",
    "pongs": b"\x8a\x80\0\0\0\0",
    "pings": b"\x89\x80\0\0\0\0",
}
# A megabyte of one letter, in a frame whose end does not come.
_LARGE = b"\x81\xff" + (2**20 + 1).to_bytes(8) + b"\0\0\0\0" + b"a" * 2**20
_CODES = frozenset({1000, 1001, 1002, 1008, 1009, 1013})
_SIZES = (100, 2_000, 20_000)
_MASK, _SHORT = 0x7F, 126
Raw = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Floods:
    """Floods of one server; what it owes to somebody and does not give is a fault.

    Args:
        port: Where the server is.
        token: Of one who may register servers.
        chance: What is done.
        faults: Where faults go.
        answers: Where answers are counted.
        pids: The server's processes.
    """

    def __init__(
        self,
        port: int,
        token: str,
        chance: random.Random,
        faults: list[str],
        answers: "Counter[str]",
        pids: Sequence[int] = (),
    ) -> None:
        self._port = port
        self._pids = pids
        self._token = token
        self._chance = chance
        self._faults = faults
        self._answers = answers
        self._kinds: tuple[Callable[[], Awaitable[str]], ...] = (
            *(self._frames, self._large_frame, self._dripped_frame, self._dripped_head),
            *(self._dripped_body, self._not_found, self._expecting, self._half, self._continuing),
        )

    async def one(self) -> None:
        """Do one of them, and look at its end."""
        kind = self._chance.choice(self._kinds)
        try:
            what = await Patience(_PATIENCE_S, self._pids).wait_for(kind())
        except TimeoutError:
            self._faults.append(f"the flood {kind.__name__} was left without an end for {_PATIENCE_S} s")
        except (asyncio.IncompleteReadError, ConnectionError):
            # It was cut off: a server need not read what it has refused.
            what = "cut off"
            self._answers[f"flood: {what}"] += 1
        else:
            self._answers[f"flood: {what}"] += 1

    # -- sockets -------------------------------------------------------------------------------------------------

    async def _frames(self) -> str:
        """Frames that say nothing, more of them than a stranger may send."""
        kind = self._chance.choice(list(_FRAMES))
        count = self._chance.choice(_SIZES)
        async with self._socket() as (reader, writer):
            writer.write(_BEGUN + _FRAMES[kind] * count)
            return await self._closed(reader, kind)

    async def _large_frame(self) -> str:
        """A frame without an end."""
        async with self._socket() as (reader, writer):
            writer.write(_LARGE)
            return await self._closed(reader, "a large frame")

    async def _dripped_frame(self) -> str:
        """A frame that comes byte by byte, until there is no time left for it."""
        async with self._socket() as (reader, writer):
            ending = asyncio.ensure_future(self._closed(reader, "a frame in drips"))
            for byte in b"\x81\xfe\x10\x00\0\0\0\0" + b"[" * 4000:
                if ending.done():
                    break
                writer.write(bytes([byte]))
                await asyncio.sleep(0.02)
            return await ending

    @asynccontextmanager
    async def _socket(self) -> AsyncIterator[Raw]:
        async with self._raw() as (reader, writer):
            writer.write(_HANDSHAKE)
            head = await reader.readuntil(b"\r\n\r\n")
            if b" 101 " not in head:
                # There are too many strangers.
                self._answers["flood: no socket"] += 1
                raise ConnectionError("refused")
            yield reader, writer

    async def _closed(self, reader: asyncio.StreamReader, what: str) -> str:
        """Read to the server's goodbye."""
        while (head := await reader.readexactly(2))[0] != 0x88:
            length = head[1] & _MASK
            if length == _SHORT:
                length = int.from_bytes(await reader.readexactly(2))
            await reader.readexactly(length)
        code = int.from_bytes((await reader.readexactly(head[1]))[:2])
        if code not in _CODES:
            self._faults.append(f"{what} is ended by {code}")
        return f"closed {code}"

    # -- requests ------------------------------------------------------------------------------------------------

    async def _dripped_head(self) -> str:
        """A head that comes byte by byte, and then is there."""
        async with self._raw() as (reader, writer):
            for byte in b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n":
                writer.write(bytes([byte]))
                await asyncio.sleep(0.01)
            return await self._expect(reader, "a head in drips", {200})

    async def _half(self) -> str:
        """Half a request, and then nothing."""
        async with self._raw() as (reader, writer):
            writer.write(b"POST /v1/sessions HTTP/1.1\r\nHost: x\r\nContent-Le")
            await self._read_to_end(reader)
            return "half a request"

    async def _dripped_body(self) -> str:
        """A body of which a byte comes now and then; the refusal does not wait for it."""
        async with self._raw() as (reader, writer):
            writer.write(
                b"POST /v1/sessions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                b"Content-Length: 100000\r\n\r\n"
            )
            answer = asyncio.ensure_future(self._expect(reader, "a body in drips", {401, 408}))
            while not answer.done():
                writer.write(b"[")
                await asyncio.sleep(0.02)
            return await answer

    async def _not_found(self) -> str:
        """Many requests in one write for what is not there: each has its answer."""
        count = self._chance.choice(_SIZES[:2])
        async with self._raw() as (reader, writer):
            writer.write(b"GET /v1/none HTTP/1.1\r\nHost: x\r\n\r\n" * count)
            for number in range(count):
                what = await self._expect(reader, f"request {number} of {count}", {401, 404, 429})
            return what

    async def _expecting(self) -> str:
        """Many requests that ask whether they may send a body, and send it at once."""
        count = self._chance.choice(_SIZES[:2])
        async with self._raw() as (reader, writer):
            writer.write(
                b"POST /v1/sessions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n{}" * count
            )
            for number in range(count):
                what = await self._expect(reader, f"expecting request {number} of {count}", {401, 429})
            return what

    async def _continuing(self) -> str:
        """Register a server that answers nothing but that one may go on."""
        count = self._chance.choice(_SIZES)

        async def go_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with suppress(asyncio.IncompleteReadError, ConnectionError):
                await reader.readuntil(b"\r\n\r\n")
                writer.write(b"HTTP/1.1 100 Continue\r\n\r\n" * count)
                await writer.drain()
            writer.close()

        async with await asyncio.start_server(go_on, "127.0.0.1") as upstream:
            url = f"http://127.0.0.1:{upstream.sockets[0].getsockname()[1]}"
            body = json.dumps({"env_id": f"Upstream{count}", "url": url, "protocol": "http"}).encode()
            async with self._raw() as (reader, writer):
                writer.write(
                    b"POST /v1/envs HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                    b"Authorization: Bearer %s\r\nContent-Length: %d\r\n\r\n"
                    % (self._token.encode(), len(body))
                    + body
                )
                return await self._expect(reader, "a registration of a server that says nothing", {405, 422})

    async def _expect(self, reader: asyncio.StreamReader, what: str, statuses: set[int]) -> str:
        """Read one answer, which has one of these statuses and a body that says why."""
        status = 100
        while status == 100:
            status_line, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")[:-2]
            status = int(status_line.split()[1])
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        if status not in statuses or not body:
            self._faults.append(f"{what} is answered {status}: {body[:300]!r}")
        return f"answered {status}"

    # -- connections ---------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _raw(self) -> AsyncIterator[Raw]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            yield reader, writer
        finally:
            writer.transport.abort()

    async def _read_to_end(self, reader: asyncio.StreamReader) -> None:
        while await reader.read(65536):
            pass
