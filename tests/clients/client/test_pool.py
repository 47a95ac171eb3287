"""The connections of a client when it ends while it connects."""

import asyncio
import random

import pytest

from rollgym.clients.net.pool import ConnectionPool, Timing


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
