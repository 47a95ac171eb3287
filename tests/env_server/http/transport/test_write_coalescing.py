"""Answers that are written together."""

import asyncio
import json
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState
from websockets.frames import Frame, Opcode
from websockets.protocol import State

from rollgym.env_server.http.transport.write_coalescing import CoalescingProtocol
from tests.support.wire import Server

HANDSHAKE = (
    b"GET / HTTP/1.1\r\nHost: here\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)


class Recorder:
    """A transport that remembers what was written, and when it was closed."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.lost: list[bytes] = []
        self.closing = False

    def write(self, data: bytes) -> None:
        (self.lost if self.closing else self.written).append(data)

    def close(self) -> None:
        self.closing = True

    def is_closing(self) -> bool:
        return self.closing

    def get_extra_info(self, name: str) -> None:
        return None

    def pause_reading(self) -> None:
        return

    def resume_reading(self) -> None:
        return


class Socket:
    """A protocol on a recorder, whose application answers each frame with itself, but `late` ones later."""

    def __init__(self) -> None:
        self.transport = Recorder()
        config = uvicorn.Config(self.application, interface="asgi3", ws_ping_interval=None, log_config=None)
        self.protocol = CoalescingProtocol(config, ServerState(), {})
        self.protocol.connection_made(self.transport)  # type: ignore[arg-type]
        self.protocol.data_received(HANDSHAKE)

    async def application(self, scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        while (message := await receive())["type"] == "websocket.receive":
            if message.get("text") == "late":
                await asyncio.sleep(0.05)
            if message.get("text") == "close":
                await send({"type": "websocket.close", "code": 4000})
                return
            await send({**message, "type": "websocket.send"})

    def receive(self, *contents: str | bytes) -> None:
        """Let frames arrive in one read."""
        data = b""
        for content in contents:
            text = isinstance(content, str)
            frame = Frame(Opcode.TEXT if text else Opcode.BINARY, content.encode() if text else content)
            data += frame.serialize(mask=True)
        self.protocol.data_received(data)

    def take(self) -> list[list[bytes]]:
        """What was written since the last time: the contents of each write's frames."""
        writes = [_contents(data) for data in self.transport.written]
        self.transport.written.clear()
        return writes


def _contents(data: bytes) -> list[bytes]:
    found = []
    while data:
        size, start = data[1], 2
        if size == 126:
            size, start = int.from_bytes(data[2:4], "big"), 4
        elif size == 127:
            size, start = int.from_bytes(data[2:10], "big"), 10
        found.append(data[start : start + size])
        data = data[start + size :]
    return found


@pytest.fixture
async def socket() -> AsyncIterator[Socket]:
    opened = Socket()
    while not opened.transport.written:
        await asyncio.sleep(0)
    assert opened.protocol.conn.state is State.OPEN
    opened.transport.written.clear()
    yield opened
    opened.protocol.connection_lost(None)
    await asyncio.sleep(0)


async def _settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_lone_frame_is_answered_by_a_write_of_its_own(socket: Socket) -> None:
    for content in ("a", b"b"):
        socket.receive(content)
        await _settle()
    assert socket.take() == [[b"a"], [b"b"]]


async def test_frames_that_came_together_are_answered_together(socket: Socket) -> None:
    socket.receive("a", b"b", "c")
    await _settle()
    assert socket.take() == [[b"a", b"b", b"c"]]
    socket.receive("d")
    await _settle()
    assert socket.take() == [[b"d"]]


@pytest.mark.parametrize("cuts", [(), (1,), (4, 9)])
async def test_text_that_is_no_utf_8_ends_the_socket(socket: Socket, cuts: tuple[int, ...]) -> None:
    frame = Frame(Opcode.TEXT, b"\xff\xfe").serialize(mask=True)
    for begin, end in pairwise((0, *cuts, len(frame))):
        socket.protocol.data_received(frame[begin:end])
    await _settle()
    assert socket.take() == [[(1007).to_bytes(2, "big")]]
    assert socket.transport.closing


async def test_answers_do_not_wait_for_a_late_one(socket: Socket) -> None:
    socket.receive("a", "b", "late", "c")
    await _settle()
    assert socket.take() == [[b"a", b"b"]]
    await asyncio.sleep(0.1)
    assert socket.take() == [[b"late", b"c"]]


async def test_much_is_not_gathered(socket: Socket) -> None:
    large = "x" * 40_000
    socket.receive(large, large, large)
    await _settle()
    assert [len(write) for write in socket.take()] == [2, 1]


async def test_what_is_gathered_goes_out_before_the_close(socket: Socket) -> None:
    socket.receive("a", "close", "b")
    await _settle()
    answers = [content for write in socket.take() for content in write]
    assert answers == [b"a", (4000).to_bytes(2, "big")]


async def test_nothing_is_written_to_a_connection_that_is_closing(socket: Socket) -> None:
    socket.receive("a", "late")
    await asyncio.sleep(0)
    socket.transport.close()
    await asyncio.sleep(0.1)
    assert socket.transport.lost == []


async def test_many_frames_at_once_are_answered_in_order_and_wait_for_no_slow_one(server: Server) -> None:
    async with server.socket() as socket:
        slow = await socket.make("SlowCount")
        number = 1000
        frames = [{"id": number, "op": "step", "session_id": slow, "action": "sleep 0.5"}]
        frames += [{"id": number + count, "op": "ping"} for count in range(1, 500)]
        await asyncio.gather(*(socket.connection.send(json.dumps(frame)) for frame in frames))
        answers = [(await socket.receive())["id"] for _ in frames]
        assert answers == [*range(number + 1, number + 500), number]
