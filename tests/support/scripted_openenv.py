"""A server in this process that speaks OpenEnv, well or as a test says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any

import websockets
from websockets.asyncio.server import ServerConnection
from websockets.datastructures import Headers
from websockets.http11 import Request, Response

Say = Callable[[ServerConnection, dict[str, Any]], Awaitable[None]]

SCHEMAS: dict[str, Any] = {
    "action": {"type": "object", "properties": {"move": {"type": "string"}}, "required": ["move"]},
    "observation": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
}


class ScriptedOpenEnv:
    """Answers as OpenEnv does; what is put in `scripts` answers one type of message instead.

    Attributes:
        pages: What is answered to `GET`: status, headers, content.
        scripts: By type of message; `open` is done when a socket was opened.
        seen: The messages that came, `open` and `lost` among them.
        handshakes: The headers of sockets' handshakes.
        refusal: The status that handshakes are refused with.
    """

    def __init__(self) -> None:
        self.url = ""
        self.pages: dict[str, tuple[int, dict[str, str], bytes]] = {}
        self.scripts: dict[str, Say] = {}
        self.seen: list[str] = []
        self.handshakes: list[Headers] = []
        self.refusal: int | None = None
        self.changed = asyncio.Event()
        self.page("/schema", SCHEMAS)
        self.page("/metadata", {"name": "Scripted", "description": "As a test says.", "version": "3"})

    def page(self, path: str, content: Any, status: int = 200, **headers: str) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.pages[path] = status, headers, body

    async def until_seen(self, kind: str, times: int = 1) -> None:
        async with asyncio.timeout(20):
            while self.seen.count(kind) < times:
                self.changed.clear()
                await self.changed.wait()

    def note(self, kind: str) -> None:
        self.seen.append(kind)
        self.changed.set()

    async def answer_http(self, connection: ServerConnection, request: Request) -> Response | None:
        if request.path == "/ws":
            self.handshakes.append(request.headers)
            if self.refusal is None:
                return None
            headers = {"Location": "ws://169.254.169.254/ws"}
            return Response(self.refusal, HTTPStatus(self.refusal).phrase, Headers(headers))
        status, headers, content = self.pages.get(request.path, (404, {}, b"{}"))
        headers = {"Content-Length": str(len(content)), "Connection": "close", **headers}
        return Response(status, HTTPStatus(status).phrase, Headers(headers), content)

    async def serve(self, connection: ServerConnection) -> None:
        self.note("open")
        count = 0
        try:
            if "open" in self.scripts:
                await self.scripts["open"](connection, {})
            async for raw in connection:
                message = json.loads(raw)
                kind = message["type"]
                self.note(kind)
                count = 0 if kind == "reset" else count + 1
                if kind in self.scripts:
                    await self.scripts[kind](connection, message)
                elif kind == "close":
                    return
                elif kind == "state":
                    await connection.send(json.dumps({"type": "state", "data": {"step_count": 0}}))
                else:
                    await connection.send(observation(f"{count}"))
        except websockets.ConnectionClosedError:
            pass
        finally:
            self.note("lost")


def observation(text: str, **data: Any) -> str:
    return json.dumps(
        {
            "type": "observation",
            "data": {"observation": {"text": text}, "reward": None, "done": False, **data},
        }
    )


def saying(*messages: Any) -> Say:
    """Send these, in one go."""

    async def say(connection: ServerConnection, message: dict[str, Any]) -> None:
        for each in messages:
            await connection.send(each if isinstance(each, str | bytes) else json.dumps(each))

    return say


async def hang(connection: ServerConnection, message: dict[str, Any]) -> None:
    """Answer nothing."""


async def hang_up(connection: ServerConnection, message: dict[str, Any]) -> None:
    """Break the connection without a goodbye."""
    connection.transport.abort()


def refusing(code: str, text: str = "no") -> Say:
    return saying({"type": "error", "data": {"code": code, "message": text}})


@asynccontextmanager
async def scripted_openenv() -> AsyncIterator[ScriptedOpenEnv]:
    server = ScriptedOpenEnv()
    async with websockets.serve(
        server.serve, "127.0.0.1", 0, process_request=server.answer_http, compression=None
    ) as listening:
        server.url = f"http://127.0.0.1:{next(iter(listening.sockets)).getsockname()[1]}"
        yield server
