"""Connections to a server: kept, used again, given up; whatever it sends, a call has an answer or an error."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from rollgym.trainer.inference.calls import HttpCall
from rollgym.trainer.inference.errors import MalformedReplyError
from rollgym.trainer.inference.server_client.connections import Connections, LostCallError, NotConnectedError

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


class Server:
    """Answers each request with what it is told to, and keeps what it was sent."""

    def __init__(self, answer):
        self.answer = answer
        self.requests = []
        self.connections = 0
        self.left = 0

    async def serve(self, reader, writer):
        self.connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = next(
                    (int(line.split(b":")[1]) for line in head.split(b"\r\n") if b"Content-Length" in line), 0
                )
                self.requests.append((head.decode(), await reader.readexactly(length)))
                answer = self.answer(len(self.requests)) if callable(self.answer) else self.answer
                if answer is None:
                    await asyncio.Event().wait()
                for part in [answer] if isinstance(answer, bytes) else answer:
                    writer.write(part)
                    await writer.drain()
                if not isinstance(answer, bytes):
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            self.left += 1
        finally:
            writer.close()


@asynccontextmanager
async def served(answer, **options):
    server = Server(answer)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    settings = {"connect_s": 5.0, "keep_s": 5.0, "largest": 1000, **options}
    connections = Connections(f"http://127.0.0.1:{port}/base/", **settings)
    try:
        yield connections, server
    finally:
        await connections.close()
        listening.close()


async def called(connections, call=None, content=None):
    async with asyncio.timeout(10):
        return await connections.call(call or HttpCall("/x", method="GET"), {"X-A": "b"}, content)


async def test_calls_one_after_the_other_share_a_connection():
    async with served(OK) as (connections, server):
        for _ in range(3):
            answer = await called(connections, HttpCall("/x", query={"a": "1 2"}), b"{}")
            assert (answer.status, answer.body) == (200, b"{}")
        assert server.connections == 1
        head, body = server.requests[0]
        assert head.startswith("POST /base/x?a=1+2 HTTP/1.1\r\nHost: 127.0.0.1:")
        assert "X-A: b\r\n" in head
        assert body == b"{}"


async def test_calls_at_one_time_have_connections_of_their_own_which_are_used_again():
    async with served(OK) as (connections, server):
        for _ in range(2):
            await asyncio.gather(*(called(connections) for _ in range(50)))
        assert server.connections == 50


async def test_a_connection_that_rested_too_long_is_not_used():
    async with served(OK, keep_s=0.0) as (connections, server):
        await called(connections)
        await asyncio.sleep(0.01)
        await called(connections)
        assert server.connections == 2


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n1\r\n}\r\n0\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",
        [b"HTTP/1.1 200 OK\r\nConnection: close\r\nConten", b"t-Length: 2\r\n\r\n{", b"}"],
        [b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n{", b"}"],
        [b"HTTP/1.0 200 OK\r\n\r\n{}"],
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}",
    ],
)
async def test_every_way_to_send_an_answer_is_read(answer):
    async with served(answer) as (connections, _):
        for _ in range(2):
            got = await called(connections)
            assert (got.status, got.body) == (200, b"{}")


@pytest.mark.parametrize(
    "answer",
    [
        [],
        [b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{"],
        [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n"],
        [b"HTTP/1.1 200"],
        b"what is this\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
    ],
)
async def test_an_answer_that_breaks_off_or_is_none_is_a_lost_call(answer):
    async with served(answer) as (connections, _):
        with pytest.raises(LostCallError) as caught:
            await called(connections)
        assert not isinstance(caught.value, NotConnectedError)


async def test_an_answer_without_end_is_refused_and_its_connection_closed():
    async with served([b"HTTP/1.1 200 OK\r\n\r\n", *[b"x" * 600] * 1000]) as (connections, _):
        with pytest.raises(MalformedReplyError, match="more than 1000 bytes"):
            await called(connections)
        assert not connections._open or all(each._transport.is_closing() for each in connections._open)


async def test_what_nobody_asked_for_closes_the_connection():
    async with served(OK + OK) as (connections, server):
        for _ in range(2):
            assert (await called(connections)).body == b"{}"
            await asyncio.sleep(0.05)
        assert server.connections == 2


async def test_who_gives_a_call_up_takes_its_connection_along():
    async with served(None) as (connections, server):
        waiting = asyncio.create_task(called(connections))
        while not server.requests:
            await asyncio.sleep(0.005)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await asyncio.sleep(0)
        assert not connections._open


async def test_calls_under_way_are_lost_when_all_is_closed():
    async with served(None) as (connections, server):
        waiting = asyncio.create_task(called(connections))
        while not server.requests:
            await asyncio.sleep(0.005)
        await connections.close()
        with pytest.raises(LostCallError):
            await waiting


async def test_a_server_that_is_not_there_was_sent_nothing():
    connections = Connections("http://127.0.0.1:9", connect_s=5.0, keep_s=5.0, largest=10)
    with pytest.raises(NotConnectedError, match="9"):
        await called(connections)


async def test_no_header_can_be_smuggled_in():
    async with served(OK) as (connections, _):
        with pytest.raises(ValueError, match="end of a line"):
            await connections.call(HttpCall("/x"), {"X-A": "b\r\nX-B: c"}, b"")
