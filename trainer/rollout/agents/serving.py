"""An application on a port of its own, in the running event loop, for as long as a context is open."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollgym.trainer.core.errors import ConfigError

_BACKLOG = 2048
_KEEP_ALIVE_S = 75
"""Longer than clients keep connections: one that is closed while a request is on its way costs the agent a retry."""


@asynccontextmanager
async def serve_app(app: Starlette, host: str, port: int, unix: Path | None = None) -> AsyncIterator[str]:
    """Serve while the context is open, and give the address.

    Args:
        app: The application that answers.
        host: The address to listen at.
        port: The port; 0 takes a free one.
        unix: A socket in the file system, to listen at in place of an address; every user may connect to it.

    Raises:
        ConfigError: If the address cannot be used.
    """
    listening = _bound(host, port) if unix is None else _bound_in_files(unix)
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=1,
    )
    server = _QuietServer(config)
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        name = f"[{host}]" if ":" in host else host
        yield f"http://{name}:{listening.getsockname()[1]}" if unix is None else f"unix:{unix}"
    finally:
        server.should_exit = True
        await serving
        listening.close()


class _QuietServer(uvicorn.Server):
    """A server that leaves signals to the program around it."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers: the trainer handles its signals itself."""
        yield


def _bound(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # Named, because asyncio sends at once on sockets that say they are TCP, and small parts late on others.
        listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        # From here on clients that come are in line, whenever the server gets its turn.
        listening.listen(_BACKLOG)
        listening.setblocking(False)
    except OSError as error:
        raise ConfigError(
            f"agents: cannot listen on {host} port {port}: {error.strerror or error}"
        ) from error
    return listening


def _bound_in_files(path: Path) -> socket.socket:
    try:
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listening.bind(str(path))
        path.chmod(0o666)
        listening.listen(_BACKLOG)
        listening.setblocking(False)
    except OSError as error:
        raise ConfigError(f"agents: cannot listen at {path}: {error.strerror or error}") from error
    return listening


_PATIENCE_S = 1.0
"""The client is on this machine or near, so a body in transit arrives at once."""


class UnreadBodies:
    """Closes the connection after an answer that leaves much of its request's body unread, from any handler.

    To reach the next request of a connection, a server reads what is left of this one, however much that is: one that
    is refused unread could keep the trainer busy for as long as its client sends. Closing at once would be no better,
    for a client that is still sending may then never see why. So the rest is read if it is short.

    Args:
        app: The application that answers.
        largest: Bytes that are read and dropped, so that the connection can be reused.
    """

    def __init__(self, app: ASGIApp, largest: int) -> None:
        self._app = app
        self._largest = largest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request, and mark the connection for closing if much of the body stays unread."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = _Body(receive)

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start" and not await body.dropped(self._largest):
                MutableHeaders(scope=message)["connection"] = "close"
            await send(message)

        await self._app(scope, body.receive, answer)


class _Body:
    """A request's body, as it comes."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._ended = False

    async def receive(self) -> Message:
        """Return what comes next, and see whether it is the last of the body."""
        message = await self._receive()
        self._ended = not message.get("more_body", False)
        return message

    async def dropped(self, largest: int) -> bool:
        """Read the rest; return whether the body ended within `largest` bytes and a short time."""
        left = largest
        try:
            async with asyncio.timeout(_PATIENCE_S):
                while not self._ended and left >= 0:
                    left -= len((await self.receive()).get("body", b""))
        except TimeoutError:
            return False
        return self._ended
