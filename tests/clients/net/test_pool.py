"""The connections of a client: when it ends while it connects, when the other side ends, and when it comes back."""

import asyncio
import random
import re

import pytest
from websockets.utils import accept_key

from rollgym.clients.net.connection import ConnectionLost, open_socket
from rollgym.clients.net.pool import Backoff, ConnectionPool, Timing
from rollgym.clients.protocol.errors import ProblemError
from rollgym.clients.protocol.frames import SUBPROTOCOLS


async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()
    # From Python 3.12 on a server waits for its connections when it is closed.
    writer.close()


@pytest.mark.parametrize("turns", range(5))
async def test_who_is_given_up_while_the_pool_is_closed_is_given_up(turns: int) -> None:
    """Taken for a broken connection, the end would be lost, and whoever gave it up would wait for ever."""
    async with await asyncio.start_server(say_nothing, "127.0.0.1", 0) as server:
        pool = ConnectionPool(
            f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}",
            headers={},
            binary=False,
            timing=Timing(5.0, 5.0, 5.0),
            jitter=random.Random(0),
        )
        waiting = asyncio.create_task(pool.connection(None))
        await asyncio.sleep(0.1)
        closing = asyncio.create_task(pool.close())
        for _ in range(turns):
            await asyncio.sleep(0)
        given_up = waiting.cancel()
        await asyncio.gather(waiting, closing, return_exceptions=True)
        assert waiting.cancelled() is given_up


async def test_who_waits_while_the_pool_is_closed_is_told() -> None:
    async with await asyncio.start_server(say_nothing, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        pool = ConnectionPool(
            url, headers={}, binary=False, timing=Timing(5.0, 5.0, 5.0), jitter=random.Random(0)
        )
        waiting = asyncio.create_task(pool.connection(None))
        await asyncio.sleep(0.1)
        await pool.close()
        with pytest.raises(ConnectionError, match="closed"):
            await waiting


@pytest.mark.parametrize(
    ("last", "reason"),
    [(b"\x88\x05\x03\xe9bye", "1001 bye"), (b"\x88\0", "1005"), (b"\x83\0", "cannot be read")],
)
async def test_a_socket_is_closed_whose_other_side_has_said_its_last_and_does_not_hang_up(
    last: bytes, reason: str
) -> None:
    """Taken for open, it would be asked again and again, and each time in vain."""
    hung_up = asyncio.Event()

    async def end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        found = re.search(rb"Sec-WebSocket-Key: (\S+)", await reader.readuntil(b"\r\n\r\n"))
        assert found is not None
        head = (
            "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Accept: {accept_key(found[1].decode())}\r\n"
            f"Sec-WebSocket-Protocol: {SUBPROTOCOLS[False]}\r\n\r\n"
        )
        writer.write(head.encode() + last)
        await reader.read(-1)
        hung_up.set()
        writer.close()

    async with await asyncio.start_server(end, "127.0.0.1", 0) as server:
        socket = await open_socket(
            f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1/ws",
            headers={},
            subprotocol=SUBPROTOCOLS[False],
            timeout_s=10,
        )
        async with asyncio.timeout(10):
            assert reason in await socket.closed
            with pytest.raises(ConnectionLost):
                socket.send(b"{}", binary=False)
            await hung_up.wait()


def test_whoever_is_refused_for_overload_comes_at_another_time_than_the_others() -> None:
    backoff = Backoff(random.Random(0))
    delays = [backoff.delay_after(ProblemError("overloaded", "", retry_after=4), 0) for _ in range(1000)]
    assert min(delays) >= 4
    assert max(delays) <= 6
    assert max(delays) - min(delays) > 1.9


def test_whoever_is_refused_again_comes_later_up_to_a_bound() -> None:
    backoff = Backoff(random.Random(0))
    problem = ProblemError("overloaded", "", retry_after=1)
    for attempt in range(8):
        delay = backoff.delay_after(problem, attempt)
        assert 1.5**attempt <= delay <= 1.5 ** (attempt + 1)
    assert [backoff.delay_after(problem, attempt) for attempt in (20, 10**9)] == [60.0, 60.0]


@pytest.mark.parametrize("asked", [1e308, 10**400])
def test_a_server_cannot_ask_for_more_than_the_bound(asked: float) -> None:
    problem = ProblemError.from_problem({"code": "overloaded", "retry_after": asked})
    assert Backoff(random.Random(0)).delay_after(problem, 3) <= 60


@pytest.mark.parametrize("asked", ["4", True, -1, float("nan"), None])
def test_what_is_no_time_is_not_waited_for(asked: object) -> None:
    problem = ProblemError.from_problem({"code": "overloaded", "retry_after": asked})
    assert Backoff(random.Random(0)).delay_after(problem, 0) <= 0.05
