"""HTTP to a registered server: connections that break in an event loop of uvloop, and turns, by an own clock."""

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
from rollgym.env_server.gateway.upstream.http_client import (
    Attempt,
    Backend,
    ConnectionLimiter,
    InterimAnswers,
    connect,
)
from tests.support.clock import clock, on_a_clock
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
        journal._server._trouble = None  # it was reached before
        journal._server.redis.execute_command = closed  # type: ignore[assignment]
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


class Requests:
    """Requests that run until a test ends them."""

    def __init__(self, limiter: ConnectionLimiter) -> None:
        self.limiter = limiter
        self.begun: list[int] = []
        self.ends: dict[int, asyncio.Event] = {}
        self.tasks: dict[int, asyncio.Task[None]] = {}

    def start(self, *numbers: int) -> None:
        for number in numbers:
            self.ends[number] = asyncio.Event()
            self.tasks[number] = asyncio.create_task(self._run(number))

    async def _run(self, number: int) -> None:
        async with self.limiter.request():
            self.begun.append(number)
            await self.ends[number].wait()


def test_turns_are_in_order_and_none_is_lost() -> None:
    async def run() -> None:
        requests = Requests(ConnectionLimiter(2))
        requests.start(*range(6))
        await clock().forward(0)
        assert requests.begun == [0, 1]
        requests.tasks[3].cancel()  # while it waits
        requests.ends[0].set()
        requests.tasks[1].cancel()  # while it runs
        await clock().forward(0)
        assert requests.begun == [0, 1, 2, 4]
        requests.ends[2].set()
        await clock().forward(0)
        requests.tasks[5].cancel()
        requests.ends[4].set()
        await clock().forward(0)
        requests.start(6, 7, 8)
        await clock().forward(0)
        assert requests.begun[-2:] == [6, 7]
        for end in requests.ends.values():
            end.set()
        await asyncio.gather(*requests.tasks.values(), return_exceptions=True)
        assert requests.begun[-1] == 8

    on_a_clock(run())


def test_one_that_is_cancelled_as_its_turn_comes_hands_it_on() -> None:
    async def run() -> None:
        requests = Requests(ConnectionLimiter(1))
        requests.start(0, 1, 2)
        await clock().forward(0)
        async with asyncio.timeout(30):
            requests.ends[0].set()
            await requests.tasks[0]
            requests.tasks[1].cancel()
            await clock().forward(0)
            assert requests.begun[-1] == 2
            requests.ends[2].set()
            await requests.tasks[2]

    on_a_clock(run())


async def connect_by_clock(limiter: ConnectionLimiter, count: int) -> list[Attempt]:
    """Begin so many connections; gives those that may be made at once."""
    attempts = [Attempt(limiter) for _ in range(count)]
    tasks = [asyncio.create_task(attempt.connecting()) for attempt in attempts]
    await clock().forward(0)
    made = [attempt for attempt, task in zip(attempts, tasks, strict=True) if task.done()]
    for task in tasks:
        task.cancel()
    return made


def test_a_server_has_to_accept_few_connections_at_once() -> None:
    async def run() -> None:
        limiter = ConnectionLimiter(64)
        first = await connect_by_clock(limiter, 10)
        assert len(first) == 4
        for attempt in first[:3]:
            attempt.ended(lost=False)
        assert len(await connect_by_clock(limiter, 10)) == 3, "an answer says that a connection was accepted"
        await clock().forward(limiter.patience_s)
        assert len(await connect_by_clock(limiter, 10)) == 4, "and so does time"
        for attempt in first:
            attempt.ended(lost=False)
        assert await connect_by_clock(limiter, 10) == [], "an end counts once"

    on_a_clock(run(), frozen=True)


def test_a_lost_connection_slows_the_next_ones_down_for_a_while() -> None:
    async def run() -> None:
        limiter = ConnectionLimiter(64)
        patience_s = limiter.patience_s
        together = await connect_by_clock(limiter, 4)
        await clock().forward(1.0)
        together[0].connected()
        for attempt in together[1:]:
            attempt.ended(lost=True)
        assert limiter.patience_s == 2 * patience_s, "those that were lost together count once"
        for _ in range(20):
            [lost] = await connect_by_clock(limiter, 1)
            await clock().forward(0.2)
            lost.connected()
            lost.ended(lost=True)
        assert limiter.patience_s == 32 * patience_s
        for _ in range(20):
            await clock().forward(61.0)
            async with limiter.request():
                pass
        assert limiter.patience_s == patience_s / 4

    on_a_clock(run(), frozen=True)


def test_a_server_that_takes_one_at_a_time_is_asked_one_thing_at_a_time() -> None:
    async def run() -> None:
        limiter = ConnectionLimiter(64)
        limiter.narrow(1)
        limiter.narrow(8)
        requests = Requests(limiter)
        requests.start(0, 1)
        await clock().forward(0)
        assert requests.begun == [0]
        for end in requests.ends.values():
            end.set()
        await asyncio.gather(*requests.tasks.values())

    on_a_clock(run())
