"""What a client of the server is without a library: HTTP calls and raw frames."""

import json
import queue
import re
import subprocess
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgpack
import websockets

from tests.support.processes import end, start_server

MODULE = "tests.support.served_envs"
ENVS = tuple(
    part
    for name in ("Count", "SlowCount", "Chance", "Arrays", "Equal")
    for part in ("--env", f"{name}={MODULE}:{name}")
)
INLINE = ("--isolation", "Count=inline", "--isolation", "Arrays=inline")


class Server:
    """A real server in a process of its own, on a free port."""

    def __init__(self, *arguments: str) -> None:
        self.process = start_server(
            *("--port", "0", "--log-level", "error", *arguments),
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.search(r"rollgym serving on (http://\S+:(\d+))", line)
        if found is None:
            _, errors = self.process.communicate(timeout=20)
            raise AssertionError(f"the server did not start: {errors}")
        self.url, self.port = found.group(1), int(found.group(2))
        self._errors: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read_errors, daemon=True)
        self._reader.start()

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._errors.put(line)

    def log(self) -> str:
        """What it has written to its log so far."""
        lines = []
        while not self._errors.empty():
            lines.append(self._errors.get())
        return "".join(lines)

    def wait_for(self, said: str) -> str:
        """The next line of its log that has this text; `queue.Empty` if none comes for a minute."""
        while said not in (line := self._errors.get(timeout=60)):
            pass
        return line

    def stop(self) -> int:
        """End it as an operator would; gives its exit code."""
        code = end(self.process, patience_s=40)
        self._reader.join(5)
        with self.process:
            return code

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def http(self, token: str | None = None) -> httpx.AsyncClient:
        """An HTTP client of this server."""
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        return httpx.AsyncClient(base_url=self.url, headers=headers, timeout=30)

    @asynccontextmanager
    async def socket(self, *, binary: bool = False, **options: Any) -> AsyncIterator["Socket"]:
        """An open socket to this server."""
        name = "rollgym.v1.msgpack" if binary else "rollgym.v1.json"
        url = f"ws://127.0.0.1:{self.port}/v1/ws"
        async with websockets.connect(
            url, subprotocols=[websockets.Subprotocol(name)], compression=None, max_size=None, **options
        ) as connection:
            yield Socket(connection, binary=binary)


class Socket:
    """One socket; answers are matched by id, so that several may be in flight."""

    def __init__(self, connection: websockets.ClientConnection, *, binary: bool) -> None:
        self.connection = connection
        self._binary = binary
        self._next_id = 0
        self._answers: dict[Any, dict[str, Any]] = {}

    def _encode(self, frame: Any) -> str | bytes:
        return msgpack.packb(frame) if self._binary else json.dumps(frame)

    async def receive(self) -> dict[str, Any]:
        """The next answer, whatever it answers."""
        data = await self.connection.recv()
        return msgpack.unpackb(data) if isinstance(data, bytes) else json.loads(data)

    async def send(self, op: str, **fields: Any) -> int:
        """Send a frame; gives its id."""
        self._next_id += 1
        await self.connection.send(self._encode({"id": self._next_id, "op": op, **fields}))
        return self._next_id

    async def answer(self, number: int) -> dict[str, Any]:
        """The answer to a frame."""
        while number not in self._answers:
            found = await self.receive()
            self._answers[found["id"]] = found
        return self._answers.pop(number)

    async def ask(self, op: str, **fields: Any) -> dict[str, Any]:
        """Send a frame and wait for its answer, good or not."""
        return await self.answer(await self.send(op, **fields))

    async def call(self, op: str, **fields: Any) -> dict[str, Any]:
        """Send a frame and give what a good answer holds."""
        found = await self.ask(op, **fields)
        assert "ok" in found, found
        return found["ok"]

    async def batch(self, *ops: dict[str, Any]) -> list[dict[str, Any]]:
        """Send a batch and give its results."""
        return (await self.ask("batch", ops=list(ops)))["results"]

    async def make(self, env_id: str = "Count", **fields: Any) -> str:
        """Make a session and reset it; gives its id."""
        made = await self.call("make", env_id=env_id, reset={"seed": 1}, **fields)
        return made["session_id"]
