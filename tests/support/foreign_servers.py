"""Servers of third parties: the examples, and one that does everything wrong that it is asked to."""

from __future__ import annotations

import asyncio
import inspect
import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from tests.support.processes import ROOT

_NODE = shutil.which("node") or "node"
COMMANDS = {
    "python": [sys.executable, str(ROOT / "examples" / "http_environment.py")],
    "javascript": [_NODE, str(ROOT / "examples" / "http_environment.mjs")],
}
_TWENTY_LINES = {
    "python, twenty lines": [sys.executable, str(ROOT / "examples" / "twenty_lines.py")],
    "javascript, twenty lines": [_NODE, str(ROOT / "examples" / "twenty_lines.mjs")],
}


class ForeignServer:
    """One of the examples on a port of its own."""

    def __init__(self, language: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = [*(COMMANDS | _TWENTY_LINES)[language], str(self.port)]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> ForeignServer:
        self._process = subprocess.Popen(self._command)
        deadline = time.monotonic() + 20
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return self
            except OSError:
                if time.monotonic() > deadline:
                    self.kill()
                    raise
                time.sleep(0.02)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait(10)

    def __exit__(self, *_: object) -> None:
        self.kill()


Said = tuple[int, dict[str, str], bytes]
Answer = Callable[[str, dict[str, Any]], "Said | Awaitable[Said]"]


def plain(content: Any, status: int = 200, **headers: str) -> tuple[int, dict[str, str], bytes]:
    return status, headers, content if isinstance(content, bytes) else json.dumps(content).encode()


@asynccontextmanager
async def scripted(answer: Answer, port: int = 0) -> AsyncIterator[str]:
    """A server in this process that answers as a function says; gives its URL."""

    answering: set[asyncio.Future[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        path = head[0].split()[1]
        length = next((int(line[15:]) for line in head if line.lower().startswith("content-length:")), 0)
        body = json.loads(await reader.readexactly(length)) if length else {}
        said = answer(path, body)
        status, headers, content = await said if inspect.isawaitable(said) else said
        lines = [f"HTTP/1.1 {status} Status", f"Content-Length: {len(content)}", "Connection: close"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + content)
        await writer.drain()
        writer.close()

    def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answering.add(task := asyncio.ensure_future(serve(reader, writer)))
        task.add_done_callback(answering.discard)
        task.add_done_callback(lambda _: writer.close())

    async with await asyncio.start_server(take, "127.0.0.1", port) as server:
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            # From Python 3.12 on a server that closes waits for its connections, and some of these answer nothing.
            for task in tuple(answering):
                task.cancel()
