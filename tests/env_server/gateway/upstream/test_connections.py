"""httpx in an event loop of uvloop: connections that break."""

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

import httpcore
import httpx
import pytest
import uvloop

from rollgym.clients.protocol.errors import ProblemError
from rollgym.env_server.gateway.journal_entries import check
from rollgym.env_server.gateway.shared_journal import SharedJournal
from rollgym.env_server.gateway.upstream.connections import Backend, InterimAnswers, connect
from tests.support.foreign_servers import plain, scripted


def on_uvloop(body: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(body)


def test_a_connection_without_a_socket_is_broken_and_no_error() -> None:
    async def ask() -> None:
        async with scripted(lambda path, body: plain({})) as url:
            port = httpx.URL(url).port
            assert port is not None
            stream = await Backend().connect_tcp("127.0.0.1", port)
            assert not stream.get_extra_info("is_readable")
            await stream.aclose()
            assert stream.get_extra_info("is_readable") is True
            assert stream.get_extra_info("ssl_object") is None
            # What the others do is why ours are there.
            bare = await httpcore.AnyIOBackend().connect_tcp("127.0.0.1", port)
            await bare.aclose()
            with pytest.raises(AttributeError):
                bare.get_extra_info("is_readable")

    on_uvloop(ask())


def test_a_peer_that_dies_as_it_is_connected_to_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection is lost between its being made and the first question about it."""
    made = Backend.connect_tcp
    dying = [True]

    async def lost(self: Backend, *arguments: Any, **named: Any) -> httpcore.AsyncNetworkStream:
        stream = await made(self, *arguments, **named)
        if dying[0]:
            await stream.aclose()
        return stream

    monkeypatch.setattr(Backend, "connect_tcp", lost)

    async def ask() -> None:
        async with scripted(lambda path, body: plain({"path": path})) as url, connect(timeout=10) as client:
            with pytest.raises(httpx.TransportError):
                await client.get(f"{url}/a")
            dying[0] = False
            assert (await client.get(f"{url}/b")).json() == {"path": "/b"}

    on_uvloop(ask())


def test_a_journal_whose_connection_was_closed_under_it_is_away() -> None:
    async def closed(*arguments: Any) -> Any:
        raise RuntimeError("unable to perform operation on <TCPTransport closed=True>; the handler is closed")

    async def write() -> None:
        journal = SharedJournal("redis://127.0.0.1:1")
        journal._trouble = None  # it was reached before
        journal._redis.execute_command = closed  # type: ignore[assignment]
        try:
            async with asyncio.timeout(10):
                assert (await journal.written("0-x", check(1))).startswith("away: unable to perform")
            with pytest.raises(ProblemError, match="draining"):
                journal.require()
        finally:
            await journal.close()

    on_uvloop(write())


@pytest.mark.parametrize("size", [1, 7, 65536])
def test_answers_that_say_to_wait_are_few(size: int) -> None:
    def feed(content: bytes) -> bool:
        answers, waits = InterimAnswers(), True
        for at in range(0, len(content), size):
            waits = answers.take(content[at : at + size])
            if not waits:
                break
        return waits

    wait = b"HTTP/1.1 100 Continue\r\nX-Note: HTTP/1.1 1\r\n\r\n"
    assert feed(wait * 16)
    with pytest.raises(httpcore.RemoteProtocolError, match="to wait more than 16 times"):
        feed(wait * 17)
    # What is in the answer that counts is no answer.
    assert not feed(wait * 3 + b"HTTP/1.1 200 OK\r\n\r\n" + wait * 100)
    assert not feed(b"no HTTP at all" + wait * 100)


async def test_a_server_that_says_to_wait_for_ever_is_given_up() -> None:
    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n" * 100_000)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(say, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, connect(base_url=f"http://127.0.0.1:{port}") as client:
        with pytest.raises(httpx.RemoteProtocolError, match="to wait more than"):
            await client.get("/spec")
