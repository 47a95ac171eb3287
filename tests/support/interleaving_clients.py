"""Bare connections of those who do everything at once: HTTP, sockets of our own protocol, and OpenEnv's."""

import asyncio
import itertools
import json
import math
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any

from rollgym.clients.net.connection import ConnectionLost, WebSocket, open_socket
from rollgym.clients.protocol.frames import SUBPROTOCOLS, dumps, loads
from tests.support.patience import Patience

# Nothing that is asked for here takes longer than seconds.
PATIENCE_S = 30.0


class Http:
    """HTTP with nothing between: a connection for each request that is on its way."""

    def __init__(self, port: int, token: str) -> None:
        self._port = port
        self._token = token
        self._free: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def ask(
        self, method: str, path: str, body: Any = None, headers: str = ""
    ) -> tuple[int, dict[str, str], bytes]:
        """Send a request; gives the status, the headers and the body of its answer.

        Where this process stood still between connecting and sending, the server has said 408 and hung up, as it does
        to whoever connects and sends nothing. Nothing was asked then, so it is asked on another connection.
        """
        while (answer := await self._ask(method, path, body, headers))[0] == HTTPStatus.REQUEST_TIMEOUT:
            pass
        return answer

    async def _ask(
        self, method: str, path: str, body: Any, headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        reader, writer = await self._connection()
        content = b"" if body is None else json.dumps(body).encode()
        headers += f"Authorization: Bearer {self._token}\r\n"
        head = f"{method} {path} HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n{headers}"
        writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        status_line, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")[:-2]
        found = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        answer = await reader.readexactly(int(found.get("content-length", 0)))
        if found.get("connection") == "close":
            writer.close()
        else:
            self._free.append((reader, writer))
        return int(status_line.split()[1]), found, answer

    async def _connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._free:
            return self._free.pop()
        return await asyncio.open_connection("127.0.0.1", self._port)

    def close(self) -> None:
        """End the connections that are free."""
        for _, writer in self._free:
            writer.close()
        self._free.clear()


async def _open(
    port: int,
    token: str,
    path: str,
    subprotocol: str | None,
    pids: Sequence[int],
    on_message: Callable[[bytes], None] | None = None,
) -> WebSocket:

    async def opening() -> WebSocket:
        while True:
            try:
                return await open_socket(
                    f"ws://127.0.0.1:{port}{path}",
                    headers={"Authorization": f"Bearer {token}"},
                    subprotocol=subprotocol,
                    timeout_s=math.inf,
                    on_message=on_message,
                )
            except ConnectionLost as lost:
                if "came too late" not in str(lost):  # as of `Http`: this process stood still
                    raise

    try:
        return await Patience(PATIENCE_S, pids).wait_for(opening())
    except TimeoutError:
        raise AssertionError(f"the handshake of {path} was not answered in {PATIENCE_S} s") from None


class Frames:
    """A socket of our own protocol; frames of one turn of the loop go out together."""

    def __init__(self, connection: WebSocket, binary: bool, faults: list[str]) -> None:
        self.connection = connection
        self._binary = binary
        self._faults = faults
        self._numbers = itertools.count()
        self.waiting: dict[int, tuple[asyncio.Future[Any], str]] = {}
        connection.on_message = self._take

    @classmethod
    async def open(
        cls, port: int, token: str, binary: bool, faults: list[str], pids: Sequence[int] = ()
    ) -> "Frames":
        connection = await _open(port, token, "/v1/ws", SUBPROTOCOLS[binary], pids)
        return cls(connection, binary, faults)

    def ask(self, op: str, fields: dict[str, Any]) -> "asyncio.Future[Any]":
        """Send a frame; gives its answer, or None where the socket was dropped before."""
        number = next(self._numbers)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        frame = {"id": number, "op": op, **fields}
        self.waiting[number] = answer, f"{op} {fields}"
        self.connection.send(dumps(frame, binary=self._binary), binary=self._binary)
        return answer

    def drop(self) -> None:
        """Go away without a word."""
        self.connection.abort()
        for answer, _ in self.waiting.values():
            if not answer.done():
                answer.set_result(None)
        self.waiting.clear()

    def _take(self, message: bytes) -> None:
        frame = loads(message, binary=self._binary)
        answer, _ = self.waiting.pop(frame["id"], (None, ""))
        if answer is None:
            self._faults.append(f"a frame was answered that nobody waits for: {frame}")
        elif not answer.done():  # who asked may have given up
            answer.set_result(frame)


class OpenEnvFrames:
    """A socket of OpenEnv's: answers come in the order of the messages.

    Whoever cannot have a session is told so without having asked, and the server hangs up. That can come together with
    the end of the handshake, or when questions are on their way, the first of which is then answered by it.

    Attributes:
        refusal: What the server said before anything was asked, if it did.
    """

    def __init__(self, faults: list[str]) -> None:
        self.refusal: dict[str, Any] | None = None
        self._connection: WebSocket | None = None
        self._faults = faults
        self._waiting: list[asyncio.Future[Any]] = []

    @classmethod
    async def open(
        cls, port: int, token: str, env_id: str, faults: list[str], pids: Sequence[int] = ()
    ) -> "OpenEnvFrames":
        made = cls(faults)
        path = f"/openenv/{env_id}/ws"
        made._connection = await _open(port, token, path, None, pids, made._take)
        made._connection.closed.add_done_callback(lambda _: made.drop())
        return made

    def ask(self, kind: str, data: dict[str, Any]) -> "asyncio.Future[Any]":
        """Send a message; gives its answer, or None where the socket ended before."""
        assert self._connection is not None
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self.refusal is not None:
            answer.set_result(None)
            return answer
        message = {"type": kind} | ({"data": data} if kind in ("step", "reset") else {})
        self._waiting.append(answer)
        self._connection.send(json.dumps(message).encode(), binary=False)
        return answer

    def drop(self) -> None:
        """Go away without a word."""
        assert self._connection is not None
        self._connection.abort()
        for answer in self._waiting:
            if not answer.done():
                answer.set_result(None)
        self._waiting.clear()

    def _take(self, data: bytes) -> None:
        message = json.loads(data)
        if self._waiting:
            self._waiting.pop(0).set_result(message)
        elif self.refusal is None and message["type"] == "error":
            self.refusal = message
        else:
            self._faults.append(f"OpenEnv's socket has said what it was not asked: {data[:200]!r}")
