"""HTTP for agents: an application on a port of its own in the running event loop, and what all of its routes share.

Routes share the reading of bodies, the handling of clients that disconnect, answers, and refusals.
"""

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollgym.clients.protocol import json_text
from rollgym.trainer.core.errors import ConfigError, TrainerError
from rollgym.trainer.rollout.agents.anthropic_messages import error_body
from rollgym.trainer.rollout.agents.errors import ApiError, invalid

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
            f"agents: cannot listen on {host} port {port}: {error.strerror or error}; name another port (0 takes a "
            "free one), or an address of this machine"
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


_log = logging.getLogger(__name__)
_T = TypeVar("_T")


async def read_body(request: Request, largest: int) -> bytes:
    """Read a body up to its size limit, and keep it for a second reader.

    Raises:
        ApiError: If it is larger.
    """
    if hasattr(request, "_body"):
        return bytes(request._body)
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > largest:
            raise ApiError(413, f"the body has more than {largest} bytes (max_body_bytes)", "body_too_large")
        chunks.append(chunk)
    body = b"".join(chunks)
    request._body = body
    return body


async def read_json(request: Request, largest: int, *, numbers_of_python: bool = False) -> dict[str, Any]:
    """Read a body that is a JSON object.

    Args:
        request: Whose body it is.
        largest: Bytes that are allowed.
        numbers_of_python: Whether NaN is read as a number, so that it can be refused by name.

    Raises:
        ApiError: If it is larger, or no such object.
    """
    body = await read_body(request, largest)
    try:
        value = json.loads(body) if numbers_of_python else json_text.read_json(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is no JSON: {str(error)[:200]}", "invalid_json") from error
    if not json_text.is_shallow(value):
        raise invalid(f"the body is nested more than {json_text.DEEPEST} deep")
    if not isinstance(value, dict):
        raise invalid("the body must be a JSON object")
    return value


def refuse_web_pages(request: Request) -> None:
    """Refuse what a web page in a browser sends to loopback: agents send no Origin header."""
    if "origin" in request.headers:
        raise ApiError(403, "requests of web pages are refused", "origin_refused")


async def while_connected(request: Request, work: Awaitable[_T]) -> _T:
    """Wait for work, and cancel it if its client disconnects.

    Raises:
        ClientDisconnect: The client has disconnected.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def json_answer(body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Response:
    """Return an object as an answer."""
    return Response(packed(body), media_type="application/json", headers=dict(headers or {}))


def packed(body: Mapping[str, Any]) -> bytes:
    """Return an object as JSON, for any content that an agent or a model put into it."""
    try:
        return orjson.dumps(body)
    except orjson.JSONEncodeError:  # half a pair of surrogates, or a number beyond 64 bits
        return json.dumps(body, default=str).encode()


def as_api_error(error: BaseException) -> ApiError:
    """Return the error that an agent receives for a failure; the run learns of it through the session."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ConfigError):
        # This server cannot fulfil the request, and a retry cannot help.
        return ApiError(400, str(error), "unsupported_value")
    if isinstance(error, TrainerError):
        # Our own errors say what is wrong, such as an inference server that does not answer.
        return ApiError(502, str(error), "inference_failed")
    _log.error("an agent's request failed", exc_info=error)
    return ApiError(500, "the request failed; the run has the reason", "internal_error")


def refusal(error: ApiError) -> Response:
    """Return a refusal as an answer of OpenAI's API."""
    return JSONResponse(error.as_body(), error.status)


def anthropic_refusal(error: ApiError) -> Response:
    """Return a refusal as an answer of Anthropic's API."""
    return JSONResponse(error_body(error), error.status)
