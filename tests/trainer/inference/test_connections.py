"""Many calls at once share pools that stay small, and every call gives its place back."""

import asyncio

import httpx
import pytest

from trainer.inference.connections import SpreadTransport


class Server(httpx.AsyncBaseTransport):
    """One pool: counts what is under way, and answers when it is told to."""

    def __init__(self, released):
        self.most = self.now = 0
        self.closed = False
        self._released = released

    async def handle_async_request(self, request):
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await self._released.wait()
        finally:
            self.now -= 1
        if request.url.path == "/broken":
            raise httpx.ReadError("gone")
        return httpx.Response(200, stream=Body())

    async def aclose(self):
        self.closed = True


class Body(httpx.AsyncByteStream):
    async def __aiter__(self):
        yield b"{}"


@pytest.fixture
def released():
    return asyncio.Event()


@pytest.fixture
async def pools(released):
    return []


@pytest.fixture
async def client(released, pools):
    def make():
        pools.append(Server(released))
        return pools[-1]

    async with httpx.AsyncClient(transport=SpreadTransport(make), base_url="http://server") as client:
        yield client
    assert all(pool.closed for pool in pools)


async def test_pools_are_as_many_as_calls_need_and_are_used_again(client, pools, released):
    for round_ in range(3):
        released.clear()
        calls = [asyncio.create_task(client.get("/")) for _ in range(100)]
        while sum(pool.now for pool in pools) < 100:
            await asyncio.sleep(0)
        released.set()
        assert {(await call).content for call in calls} == {b"{}"}, round_
        assert len(pools) == 7
        assert max(pool.most for pool in pools) == 16


async def test_few_calls_share_one_pool(client, pools, released):
    released.set()
    for _ in range(50):
        await client.get("/")
    assert len(pools) == 1


async def test_calls_that_break_or_are_cancelled_or_left_unread_give_their_place_back(
    client, pools, released
):
    running = [asyncio.create_task(client.get("/")) for _ in range(16)]
    while not pools or pools[0].now < 16:
        await asyncio.sleep(0)
    for call in running:
        call.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    released.set()
    for _ in range(20):
        with pytest.raises(httpx.ReadError):
            await client.get("/broken")
        async with client.stream("GET", "/") as response:
            assert response.status_code == 200
        await response.aclose()
    assert len(pools) == 1
