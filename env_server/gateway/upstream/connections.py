"""Connections of httpx in an event loop of uvloop.

A connection that breaks loses its socket at once there, and anyio, which httpx asks whether the connection is good,
raises an AttributeError for want of it: where a peer dies just as it is connected to, or while its connection rests. No
caller of httpx expects that. Here such a connection is what it is: broken.
"""

from collections.abc import Iterable
from ssl import SSLContext
from typing import Any

import httpcore
import httpx


def connect(*, limits: httpx.Limits | None = None, **arguments: Any) -> httpx.AsyncClient:
    """Make a client that raises nothing but httpx's errors where connections break.

    Args:
        limits: The connections that it has and keeps; httpx's own, if None.
        **arguments: Of `httpx.AsyncClient`. Variables of the environment have no say.
    """
    transport = httpx.AsyncHTTPTransport(trust_env=False, limits=limits or httpx.Limits())
    # httpx hands no backend on.
    transport._pool._network_backend = Backend()
    return httpx.AsyncClient(transport=transport, trust_env=False, **arguments)


class Backend(httpcore.AsyncNetworkBackend):
    """Opens connections through anyio."""

    def __init__(self) -> None:
        self._backend = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Open a connection."""
        return _Stream(
            await self._backend.connect_tcp(
                host, port, timeout, local_address, None if socket_options is None else list(socket_options)
            )
        )

    async def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: Iterable[Any] | None = None
    ) -> httpcore.AsyncNetworkStream:
        """Open a connection within this machine."""
        options = None if socket_options is None else list(socket_options)
        return _Stream(await self._backend.connect_unix_socket(path, timeout, options))

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        await self._backend.sleep(seconds)


class _Stream(httpcore.AsyncNetworkStream):
    """A connection that can be asked about itself when it has broken."""

    def __init__(self, stream: httpcore.AsyncNetworkStream) -> None:
        self._stream = stream

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return await self._stream.read(max_bytes, timeout)

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        await self._stream.write(buffer, timeout)

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def start_tls(
        self, ssl_context: SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.AsyncNetworkStream:
        return _Stream(await self._stream.start_tls(ssl_context, server_hostname, timeout))

    def get_extra_info(self, info: str) -> Any:
        try:
            return self._stream.get_extra_info(info)
        except AttributeError:
            # It has no socket any more. An idle connection that can be read from is one that has come to its end.
            return True if info == "is_readable" else None
