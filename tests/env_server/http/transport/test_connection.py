"""Connections that send half a request, too much of one, or read no answer."""

import asyncio
import json
import resource
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path

import httpx
import pytest

from rollgym.env_server.access.tokens import Quota, add_token
from rollgym.env_server.http.transport.unread_answers import UnreadAnswers
from tests.support.wire import ENVS, INLINE, Server

HEAD = b"GET /health HTTP/1.1\r\nHost: x\r\n"
UPGRADE = (
    b"GET /v1/ws HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\n"
)
KEY = b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
LIMITS = ("--request-timeout-s", "1", "--max-header-bytes", "8192", "--max-connections", "12")
_MORE_THAN_KERNELS_HOLD = 24 * 2**20
Raw = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture(scope="module")
def bounded() -> Iterator[Server]:
    with Server(*ENVS, *INLINE, *LIMITS) as server:
        yield server
        assert "failed inside the server" not in server.log()


@pytest.fixture(scope="module")
def patient() -> Iterator[Server]:
    # Some of its peers never read, which a drain would wait for.
    with Server("--max-in-flight", "64", "--drain-grace-s", "0.5") as server:
        yield server
        assert "failed inside the server" not in server.log()


@asynccontextmanager
async def raw(server: Server, unread_bytes: int | None = None) -> AsyncIterator[Raw]:
    """A bare connection, whose kernel keeps about so many bytes that nobody has read."""
    connection = socket.socket()
    if unread_bytes is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, unread_bytes)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", server.port))
    reader, writer = await asyncio.open_connection(sock=connection)
    try:
        yield reader, writer
    finally:
        writer.close()


async def rest(reader: asyncio.StreamReader) -> bytes:
    """All that comes until the server closes."""
    async with asyncio.timeout(20):
        try:
            return await reader.read()
        except ConnectionResetError:
            return b""


async def healthy(server: Server) -> None:
    async with server.http() as client:
        assert (await client.get("/health")).status_code == 200


@pytest.mark.parametrize(
    "part",
    [
        b"",
        b"GET /hea",
        HEAD,
        HEAD + b"X-Long: " + b"a" * 100,
        b"POST /v1/sessions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{",
        b"POST /v1/sessions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{",
        b"GET /v1/ws HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n",
    ],
    ids=["nothing", "line", "head", "header", "body", "chunk", "handshake"],
)
async def test_half_a_request_is_not_waited_for(bounded: Server, part: bytes) -> None:
    async with raw(bounded) as (reader, writer):
        writer.write(part)
        assert is_problem(await rest(reader), 408, "invalid_request")
    await healthy(bounded)


async def test_a_request_that_drips_is_not_waited_for(bounded: Server) -> None:
    """Each byte is in time; the request is not."""
    async with raw(bounded) as (reader, writer):
        ending = asyncio.create_task(rest(reader))
        for byte in HEAD + b"X: " + b"a" * 10_000:
            if ending.done():
                break
            writer.write(bytes([byte]))
            await asyncio.sleep(0.05)
        assert (await ending).startswith(b"HTTP/1.1 408 ")


async def test_a_connection_that_is_kept_may_ask_again(bounded: Server) -> None:
    async with raw(bounded) as (reader, writer):
        for pause in (0.0, 0.6, 1.4):
            await asyncio.sleep(pause)
            writer.write(HEAD + b"\r\n")
            assert b'{"status":"alive"}' in await reader.readuntil(b'"alive"}')
        writer.write(HEAD)
        assert (await rest(reader)).startswith(b"HTTP/1.1 408 ")


async def test_a_slow_answer_is_no_slow_request(bounded: Server) -> None:
    async with bounded.http() as client, raw(bounded) as (reader, writer):
        made = (await client.post("/v1/sessions", json={"env_id": "SlowCount", "reset": {}})).json()[
            "session_id"
        ]
        body = json.dumps({"action": "sleep 2"}).encode()
        step = f"POST /v1/sessions/{made}/step HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        writer.write(step.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        # The next request stands in line, unread and half.
        writer.write(HEAD)
        await asyncio.sleep(1.5)
        writer.write(b"\r\n")
        assert b'"step":1' in await reader.readuntil(b'"step":1')
        assert b'{"status":"alive"}' in await reader.readuntil(b'"alive"}')


@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + b"a" * 20_000,
        HEAD + b"X-Long: " + b"a" * 20_000,
        HEAD + b"X-Long: " + b"a" * 20_000 + b"\r\n\r\n",
        HEAD + b"".join(b"X-%d: a\r\n" % number for number in range(4000)) + b"\r\n",
        HEAD + b"X" * 300_000,
    ],
    ids=["path", "unfinished", "value", "many", "name"],
)
async def test_heads_are_bounded(bounded: Server, head: bytes) -> None:
    async with raw(bounded) as (reader, writer):
        writer.write(head)
        answer = await rest(reader)
        # Or it is reset, where the rest was on its way.
        assert not answer or is_problem(answer, 431, "too_large")
    async with raw(bounded) as (reader, writer):
        writer.write(HEAD + b"X-Long: " + b"a" * 8_000 + b"\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
    await healthy(bounded)


async def test_heads_of_large_bodies_are_small(bounded: Server) -> None:
    async with bounded.http() as client:
        body = {"env_id": "Count", "kwargs": {"length": "x" * 900_000}}
        assert (await client.post("/v1/sessions", json=body)).json()["code"] == "invalid_kwargs"


@pytest.mark.parametrize(
    "head",
    [
        b"POST /v1/sessions/close HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nContent-Length: 40\r\n\r\n{}",
        b"POST /v1/sessions/close HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}",
        b"POST /v1/sessions/close HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked, identity\r\n\r\n{}",
        b"POST /v1/sessions/close HTTP/1.1\r\nHost: x\r\nContent-Length : 2\r\n\r\n{}",
        b"POST /v1/sessions/close HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        b"POST /v1/sessions/close HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nhost: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: a@localhost\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost/path\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",
        b"GET /v1/ws HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n",
        b"POST /v1/ws HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nContent-Length: 3\r\n"
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\nabc",
        b"GET /v1/ws HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Version: 13\r\n\r\n",
        b"GET /v1/ws HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 99\r\n\r\n",
        UPGRADE + b"Sec-WebSocket-Key: abc\r\n\r\n",
        UPGRADE + KEY + b"Sec-WebSocket-Protocol: ,,\r\n\r\n",
        UPGRADE + KEY + b"Origin: http://127.0.0.1\r\nOrigin: http://127.0.0.1\r\n\r\n",
        UPGRADE + KEY + b"Content-Length: 5\r\n\r\nhello",
        UPGRADE + KEY + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/sessions/close HTTP/1.0\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\n folded: y\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nX: a\nY: b\r\n\r\n",
        b"GET /health\x00 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
    ids=[
        *("two-lengths", "length-and-chunks", "chunks-not-last", "space", "zipped-chunks", "two-codings"),
        *("two-hosts", "one-host-twice", "user-in-host", "path-in-host"),
        *("no-host", "socket-without-host", "socket-posted"),
        *("socket-without-key", "socket-of-another-version", "socket-with-half-a-key"),
        *("socket-of-no-protocol", "socket-of-two-origins", "socket-with-a-body", "socket-with-chunks"),
        "chunks-of-1.0",
        *("folded", "bare-lf", "nul", "tls"),
    ],
)
async def test_what_two_parsers_could_read_differently_is_refused(bounded: Server, head: bytes) -> None:
    async with raw(bounded) as (reader, writer):
        writer.write(head)
        answer = await rest(reader)
        assert answer.startswith(b"HTTP/1.1 400 "), answer
        assert answer.count(b"HTTP/1.1 4") == 1, "what follows is not taken for another request"
        assert is_problem(answer, 400, "invalid_request")


def is_problem(answer: bytes, status: int, code: str) -> bool:
    """Whether an answer is a problem as any other of the protocol."""
    head, _, body = answer.partition(b"\r\n\r\n")
    problem = json.loads(body)
    return b"application/problem+json" in head and (problem["status"], problem["code"]) == (status, code)


@pytest.mark.parametrize("after", [b"nonsense\r\n\r\n", HEAD + b"Host: y\r\n\r\n"])
async def test_what_was_asked_before_is_answered_first(bounded: Server, after: bytes) -> None:
    async with bounded.http() as client, raw(bounded) as (reader, writer):
        made = (await client.post("/v1/sessions", json={"env_id": "SlowCount", "reset": {}})).json()
        body = json.dumps({"action": "sleep 0.2"}).encode()
        path = f"/v1/sessions/{made['session_id']}/step"
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body + after)
        answer = await rest(reader)
    first, _, second = answer.partition(b"HTTP/1.1 400 ")
    assert first.startswith(b"HTTP/1.1 200 ")
    assert b'"step":1' in first
    assert is_problem(second, 400, "invalid_request")


async def test_bodies_are_not_unpacked(bounded: Server) -> None:
    async with bounded.http() as client:
        for coding in ("gzip", "GZIP, identity", "br"):
            headers = {"Content-Encoding": coding, "Content-Type": "application/json"}
            answer = await client.post("/v1/sessions", content=b'{"env_id": "Count"}', headers=headers)
            assert (answer.status_code, answer.json()["code"]) == (415, "unsupported_media_type")
        twice = [
            ("Content-Encoding", "identity"),
            ("Content-Type", "application/json"),
            ("Content-Encoding", "gzip"),
        ]
        answer = await client.post("/v1/sessions", content=b'{"env_id": "Count"}', headers=twice)
        assert answer.status_code == 415, "of a header that came twice, both count"


UNWANTED = b"POST /v1/nothing HTTP/1.1\r\nHost: x\r\n"
WITHOUT_END = [
    UNWANTED + b"Content-Length: 10000000000\r\n\r\n",
    UNWANTED + b"Transfer-Encoding: chunked\r\n\r\n2540be400\r\n",
]


@pytest.mark.parametrize("head", WITHOUT_END, ids=["length", "chunk"])
async def test_a_body_that_nobody_wants_is_not_read_without_end(patient: Server, head: bytes) -> None:
    sent = 0
    async with raw(patient) as (reader, writer), asyncio.timeout(20):
        writer.write(head)
        assert (await reader.readline()).startswith(b"HTTP/1.1 404 ")
        with suppress(ConnectionError):
            while sent < 4 * _MORE_THAN_KERNELS_HOLD:
                writer.write(b"a" * 65536)
                await writer.drain()
                sent += 65536
    assert sent < _MORE_THAN_KERNELS_HOLD


async def test_a_body_that_nobody_wants_is_not_waited_for(patient: Server) -> None:
    """Long before the minute that a request may take."""
    async with raw(patient) as (reader, writer):
        writer.write(WITHOUT_END[0] + b"a" * 1000)
        answer = await rest(reader)
    assert is_problem(answer, 404, "not_found")


async def test_a_body_that_nobody_wants_and_that_ends_leaves_the_connection_as_it_was(
    patient: Server,
) -> None:
    async with raw(patient) as (reader, writer), asyncio.timeout(20):
        for _ in range(2):
            writer.write(UNWANTED + b"Content-Length: 3000000\r\n\r\n")
            assert (await reader.readline()).startswith(b"HTTP/1.1 404 ")
            writer.write(b"a" * 3_000_000 + HEAD + b"\r\n")
            await reader.readuntil(b'"alive"}')


async def test_connections_are_bounded(bounded: Server) -> None:
    open_ones = [await asyncio.open_connection("127.0.0.1", bounded.port) for _ in range(30)]
    try:
        async with asyncio.timeout(20):
            ends = [asyncio.create_task(rest(reader)) for reader, _ in open_ones]
            while sum(end.done() for end in ends) < 18:
                await asyncio.sleep(0.01)
        await asyncio.gather(*ends)
    finally:
        for _, writer in open_ones:
            writer.close()
    async with asyncio.timeout(20):
        while True:
            try:
                await healthy(bounded)
                return
            except (AssertionError, OSError):
                await asyncio.sleep(0.05)
            except Exception as error:
                if "disconnected" not in str(error) and "reset" not in str(error).lower():
                    raise


def resident_mib(pid: int) -> float:
    """The memory of a process that is there in fact."""
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return int(fields[1]) * 4096 / 2**20


@pytest.mark.parametrize("kind", ["answers", "problems", "pings"])
async def test_a_peer_that_does_not_read_is_not_answered_without_end(patient: Server, kind: str) -> None:
    # As small as can be: what kernels take in is answered, and that takes a while.
    async with raw(patient, unread_bytes=8192) as (reader, writer):
        writer.write(
            b"GET /v1/ws HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
        )
        await reader.readuntil(b"\r\n\r\n")
        # From here on, nothing is read.
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        before = resident_mib(patient.process.pid)
        frames = b"".join(unread_frame(kind, number) for number in range(2000))
        sent = 0
        try:
            while sent < _MORE_THAN_KERNELS_HOLD:
                writer.write(frames)
                async with asyncio.timeout(1):
                    await writer.drain()
                sent += len(frames)
        except TimeoutError:
            pass
        grown = resident_mib(patient.process.pid) - before
        assert grown < 16, f"{sent / 2**20:.0f} MiB were taken in, and {grown:.0f} MiB are kept"
        assert sent < _MORE_THAN_KERNELS_HOLD, "the server reads on and on"
        await healthy(patient)


UNREAD = b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n"


async def test_who_reads_no_answers_is_not_waited_for(bounded: Server) -> None:
    async with raw(bounded, unread_bytes=8192) as (reader, writer), asyncio.timeout(20):
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        await until_cut_off(writer, UNREAD * 200, 0.2)
    await healthy(bounded)


async def test_who_reads_slowly_is_waited_for(bounded: Server) -> None:
    answers = 0
    async with raw(bounded, unread_bytes=8192) as (reader, writer), asyncio.timeout(60):
        writer.write(UNREAD * 40 + HEAD + b"\r\n")
        for _ in range(5):
            # Much less than the second in which something has to be read.
            await asyncio.sleep(0.5)
            answers += (await reader.readexactly(400_000)).count(b"HTTP/1.1 200 ")
        await read_until(reader, b'"alive"}')
    assert answers


class Waiting(asyncio.Transport):
    """A connection on which equally many bytes wait whenever somebody looks."""

    def __init__(self, on_look: Callable[[], None]) -> None:
        super().__init__()
        self.on_look = on_look
        self.looks = 0
        self.is_aborted = False
        self.is_over = asyncio.Event()

    def get_write_buffer_size(self) -> int:
        self.looks += 1
        asyncio.get_running_loop().call_soon(self.on_look)
        if self.looks > 4:
            self.is_over.set()
        return 100

    def is_closing(self) -> bool:
        return self.is_aborted

    def abort(self) -> None:
        self.is_aborted = True
        self.is_over.set()


@pytest.mark.parametrize("reads", [True, False])
async def test_as_much_that_waits_again_is_not_what_waited_before(reads: bool) -> None:
    # All of it was read in between, and the next answer is as long.
    waiting = Waiting(lambda: unread.resumed() if reads else None)
    unread = UnreadAnswers(waiting, 0.01, lambda: True)
    unread.watch()
    async with asyncio.timeout(10):
        await waiting.is_over.wait()
    unread.stop()
    assert waiting.is_aborted is not reads


async def test_who_leaves_before_its_answers_leaves_no_trace_in_the_log() -> None:
    with Server(*ENVS, *INLINE) as server:
        async with raw(server, unread_bytes=8192) as (reader, writer), asyncio.timeout(20):
            reader._transport.pause_reading()  # type: ignore[attr-defined]
            with suppress(TimeoutError):
                async with asyncio.timeout(1):
                    while True:
                        writer.write(UNREAD * 200)
                        await writer.drain()
            writer.transport.abort()
        await healthy(server)
        assert "Traceback" not in server.log()


AROUND = {
    "trailers": b"2\r\n{}\r\n0\r\n" + b"x: y\r\n" * 20_000,
    "a trailer": b"2\r\n{}\r\n0\r\nx: " + b"y" * 100_000,
    "an extension": b"2;" + b"x" * 100_000,
    "a size": b"0" * 100_000,
}


@pytest.mark.parametrize("kind", AROUND)
async def test_what_is_around_a_body_is_bounded(patient: Server, kind: str) -> None:
    """Headers behind a body would be kept for as long as they come."""
    async with raw(patient) as (reader, writer), asyncio.timeout(20):
        writer.write(b"POST /v1/sessions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
        writer.write(b"Transfer-Encoding: chunked\r\n\r\n" + AROUND[kind])
        assert is_problem(await rest(reader), 431, "too_large")
    await healthy(patient)


async def test_trailers_of_an_answered_request_are_bounded(patient: Server) -> None:
    async with raw(patient) as (reader, writer), asyncio.timeout(20):
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n")
        await read_until(reader, b'"alive"}')
        before = resident_mib(patient.process.pid)
        await until_cut_off(writer, b"x: y\r\n" * 2000)
        assert resident_mib(patient.process.pid) - before < 16


async def until_cut_off(writer: asyncio.StreamWriter, message: bytes, pause_s: float = 0.0) -> None:
    """Send the same until the server ends the connection."""
    with suppress(ConnectionError):
        while True:
            writer.write(message)
            await writer.drain()
            await asyncio.sleep(pause_s)


def unread_frame(kind: str, number: int) -> bytes:
    """A WebSocket frame, masked with zeros."""
    if kind == "pings":
        return b"\x89" + bytes([0x80 | 125]) + bytes(4) + b"p" * 125
    # Frames whose answer takes a task, and frames that are answered at once.
    op = {"op": "make", "env_id": "No" * 60} if kind == "answers" else {"op": "x" * 80, "fill": "y" * 60}
    content = json.dumps({"id": number, **op}).encode()
    return b"\x81" + bytes([0x80 | 126]) + len(content).to_bytes(2) + bytes(4) + content


async def test_a_message_in_many_pieces_takes_no_more_memory_than_in_one(bounded: Server) -> None:
    process = Path(f"/proc/{bounded.process.pid}")

    def peak_kib() -> int:
        lines = (process / "status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

    async with raw(bounded) as (reader, writer), asyncio.timeout(60):
        writer.write(
            b"GET /v1/ws HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\r\n\r\n"
        )
        assert b"101" in await reader.readuntil(b"\r\n\r\n")
        # Forgets the peak so far.
        (process / "clear_refs").write_text("5")
        before = peak_kib()
        # A frame of text that goes on, and pieces of it of two bytes.
        writer.write(b"\x01\x81\0\0\0\0{" + b"\x00\x82\0\0\0\0  " * 200_000)
        last = b'"id": 1, "op": "ping"}'
        writer.write(b"\x80" + bytes([0x80 | len(last)]) + b"\0\0\0\0" + last)
        head = await reader.readexactly(2)
        assert b'"ok"' in await reader.readexactly(head[1])
        assert peak_kib() - before < 7 * 1024


# -- floods ------------------------------------------------------------------------------------------------------

HANDSHAKE = UPGRADE + KEY + b"\r\n"
# What follows a message that has begun: frames masked with zeros.
IDLE = {
    "empty fragments": b"\x00\x80\0\0\0\0",
    "fragments of a byte": b"\x00\x81\0\0\0\0 ",
    "pongs": b"\x8a\x80\0\0\0\0",
    "pings": b"\x89\x80\0\0\0\0",
}
BEGUN = b"\x01\x80\0\0\0\0"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that needs tokens; none of those who ask here has one."""
    tokens = tmp_path_factory.mktemp("tokens") / "tokens.yaml"
    add_token(tokens, "somebody", ["play"], Quota())
    with Server(*ENVS, *INLINE, "--token-file", str(tokens)) as server:
        yield server
        assert "failed inside the server" not in server.log()


async def ended_by(reader: asyncio.StreamReader) -> int:
    """With which code the server closes a socket; pongs before that do not count."""
    while (head := await reader.readexactly(2))[0] != 0x88:
        await reader.readexactly(head[1])
    return int.from_bytes((await reader.readexactly(head[1]))[:2])


@pytest.mark.parametrize("kind", IDLE)
async def test_who_does_not_say_who_it_is_sends_few_frames(guarded: Server, kind: str) -> None:
    async with raw(guarded) as (reader, writer), asyncio.timeout(20):
        writer.write(HANDSHAKE)
        assert b" 101 " in await reader.readuntil(b"\r\n\r\n")
        writer.write(BEGUN + IDLE[kind] * 1500)
        assert await ended_by(reader) == 1008
        await rest(reader)


@pytest.mark.parametrize("message", [b"\x81\x82\0\0\0\0{}", b"\x82\x82\0\0\0\0{}"], ids=["text", "bytes"])
async def test_who_was_refused_sends_few_more_frames(guarded: Server, message: bytes) -> None:
    """Long before the time is over in which its goodbye is waited for."""
    async with raw(guarded) as (reader, writer), asyncio.timeout(5):
        writer.write(HANDSHAKE)
        assert b" 101 " in await reader.readuntil(b"\r\n\r\n")
        writer.write(message)
        assert (await reader.readexactly(2))[0] == 0x81
        await until_cut_off(writer, message * 1000, 0.05)


async def test_empty_fragments_are_few_for_everybody(patient: Server) -> None:
    async with raw(patient) as (reader, writer), asyncio.timeout(20):
        writer.write(HANDSHAKE)
        assert b" 101 " in await reader.readuntil(b"\r\n\r\n")
        # Pings and pongs of somebody who is known are none of it.
        writer.write((IDLE["pings"] + IDLE["pongs"]) * 1500)
        message = b'{"id": 1, "op": "ping"}'
        for _ in range(3):
            writer.write(BEGUN + IDLE["empty fragments"] * 900)
            writer.write(b"\x80" + bytes([0x80 | len(message)]) + bytes(4) + message)
        writer.write(BEGUN + IDLE["empty fragments"] * 1500)
        assert await ended_by(reader) == 1008


@pytest.mark.parametrize("flood", ["pongs", "fragments", "requests"])
async def test_a_flood_is_taken_in_slices(patient: Server, flood: str) -> None:
    """Others have their turn in between: what they ask is answered before the flood is through."""
    last = b'{"id": 1, "op": "ping"}'
    final = b"\x80" + bytes([0x80 | len(last)]) + bytes(4) + last
    frames = {
        "pongs": IDLE["pongs"] * 300_000 + b"\x81" + final[1:],
        "fragments": BEGUN + IDLE["fragments of a byte"] * 300_000 + final,
        "requests": b"GET /v1/none HTTP/1.1\r\nHost: x\r\n\r\n" * 4000 + HEAD + b"\r\n",
    }[flood]
    async with raw(patient) as (reader, writer), httpx.AsyncClient(base_url=patient.url) as other:
        async with asyncio.timeout(60):
            await other.get("/health")
            if flood != "requests":
                writer.write(HANDSHAKE)
                assert b" 101 " in await reader.readuntil(b"\r\n\r\n")
            writer.write(frames)
            through = asyncio.ensure_future(
                read_until(reader, b'"alive"}' if flood == "requests" else b'"ok"')
            )
            answered = 0
            while not through.done():
                await other.get("/health")
                answered += 1
            await through
    assert answered > 20


async def read_until(reader: asyncio.StreamReader, end: bytes) -> None:
    """Read until this comes, however much comes before it."""
    last = b""
    while end not in last:
        new = await reader.read(65536)
        assert new, "the connection was closed before that"
        last = last[-len(end) :] + new


# -- refusals that arrive ----------------------------------------------------------------------------------------

BODY = b"a" * 1_800_000
REFUSED = {
    "too large": (b"POST /v1/sessions", b"application/json", BODY, 413),
    "too large, in chunks": (b"POST /v1/sessions", b"application/json", None, 413),
    "not found": (b"POST /v1/nothing", b"application/json", BODY[:900_000], 404),
    "another media type": (b"POST /v1/sessions", b"text/plain", BODY[:900_000], 415),
}


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
@pytest.mark.parametrize("kind", REFUSED)
async def test_refusals_arrive_on_connections_that_end(patient: Server, kind: str, version: bytes) -> None:
    what, media_type, body, status = REFUSED[kind]
    if body is None:
        if version == b"1.0":
            return
        how, body = b"Transfer-Encoding: chunked", b"1b7740\r\n" + BODY + b"\r\n0\r\n\r\n"
    else:
        how = b"Content-Length: %d" % len(body)
    head = b"%s HTTP/%s\r\nHost: x\r\nConnection: close\r\nContent-Type: %s\r\n%s\r\n\r\n"
    for _ in range(5):
        async with raw(patient) as (reader, writer), asyncio.timeout(20):
            writer.write(head % (what, version, media_type, how))
            # As a client that looks at the answer when it has sent all.
            for at in range(0, len(body), 65536):
                writer.write(body[at : at + 65536])
                await writer.drain()
            answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 %d " % status), answer[:100]
        assert b'"code"' in answer


async def test_tokens_are_asked_for_before_a_body_on_a_connection_that_ends(guarded: Server) -> None:
    async with raw(guarded) as (reader, writer), asyncio.timeout(20):
        writer.write(b"POST /v1/sessions HTTP/1.0\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(BODY))
        for at in range(0, len(BODY), 65536):
            writer.write(BODY[at : at + 65536])
            await writer.drain()
        assert is_problem(await reader.read(), 401, "unauthorized")


async def test_a_connection_that_ends_is_not_held_by_a_body_that_does_not_come(patient: Server) -> None:
    async with raw(patient) as (reader, writer), asyncio.timeout(20):
        writer.write(b"POST /v1/nothing HTTP/1.0\r\nHost: x\r\nContent-Length: 1000000\r\n\r\nabc")
        assert is_problem(await reader.read(), 404, "not_found")
        with pytest.raises(ConnectionError):
            await drip(writer)


async def drip(writer: asyncio.StreamWriter) -> None:
    """Send a byte now and then, for ever."""
    while True:
        writer.write(b"a")
        await writer.drain()
        await asyncio.sleep(0.05)


def test_who_has_no_descriptors_left_says_so() -> None:
    with Server(*ENVS, *INLINE) as server:
        pid = server.process.pid
        used = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (used + 12, used + 12))
        with ExitStack() as stack:
            for _ in range(20):
                stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            said = server.wait_for("file descriptors")
            assert f"of {used + 12} file descriptors hardly any are left" in said
        with httpx.Client(transport=httpx.HTTPTransport(retries=10), base_url=server.url) as again:
            # Once it has noticed that they are gone, it has room again.
            while True:
                with suppress(httpx.TransportError):
                    assert again.get("/health").status_code == 200
                    break
        assert "file descriptors" not in server.log(), "it is said once"
