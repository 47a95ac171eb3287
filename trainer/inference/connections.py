"""Connections to one server, in pools that stay small."""

from collections.abc import AsyncIterator, Callable

import httpx

_LARGEST_POOL = 16
"""Calls under way in one pool."""


class SpreadTransport(httpx.AsyncBaseTransport):
    """Spreads calls over as many small pools of connections as they need.

    httpx looks at every connection of a pool whenever a call begins or ends, at idle ones by a system call. In one pool
    a call would cost the more, the more of them are under way (1,000: 9.3 ms of processor time, in small pools 1.7).

    Args:
        make_pool: Makes a pool.
    """

    def __init__(self, make_pool: Callable[[], httpx.AsyncBaseTransport]) -> None:
        self._make_pool = make_pool
        self._pools: list[_Pool] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request over the first pool that has room; so few calls share few connections."""
        pool = next((pool for pool in self._pools if pool.under_way < _LARGEST_POOL), None)
        if pool is None:
            pool = _Pool(self._make_pool())
            self._pools.append(pool)
        return await pool.send(request)

    async def aclose(self) -> None:
        """Close all pools."""
        for pool in self._pools:
            await pool.transport.aclose()


class _Pool:
    def __init__(self, transport: httpx.AsyncBaseTransport) -> None:
        self.transport = transport
        self.under_way = 0

    async def send(self, request: httpx.Request) -> httpx.Response:
        self.under_way += 1
        try:
            response = await self.transport.handle_async_request(request)
        except BaseException:
            self.under_way -= 1
            raise
        response.stream = _CountedStream(response.stream, self)
        return response


class _CountedStream(httpx.AsyncByteStream):
    """A body that gives its place back when it is closed, however often that is."""

    def __init__(self, stream: httpx.SyncByteStream | httpx.AsyncByteStream, pool: _Pool) -> None:
        assert isinstance(stream, httpx.AsyncByteStream)
        self._stream = stream
        self._pool: _Pool | None = pool

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._stream:
            yield part

    async def aclose(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.under_way -= 1
        await self._stream.aclose()
