"""Hundreds who ask at the same moment: each is answered, whatever turn of the loop it has to wait for."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.wire import ENVS, INLINE, Server

_MANY = 200
_HANDSHAKE = (
    b"GET /v1/ws HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
_PING = b'{"id":1,"op":"ping"}'
# Unmasked by a mask of zeros.
_FRAME = bytes([0x81, 0x80 | len(_PING)]) + bytes(4) + _PING


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    # The machine may be busy: nobody is to be refused for that.
    with Server(*ENVS, *INLINE, "--max-queue-s", "60") as server:
        yield server
        assert "failed inside the server" not in server.log()


@contextmanager
def stopped(server: Server) -> Iterator[None]:
    """What is sent meanwhile is all there when it goes on."""
    os.kill(server.process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.process.pid, signal.SIGCONT)


async def _connections(server: Server) -> list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    return [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(_MANY)]


async def _answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = int(head.partition(b"content-length:")[2].split()[0])
    return int(head.split()[1]), await reader.readexactly(length)


async def test_of_requests_in_pieces_and_in_pairs_each_is_answered(server: Server) -> None:
    body = json.dumps({"env_id": "Count", "reset": {"seed": 1}}).encode()
    head = b"POST /v1/sessions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    request = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    connections = await _connections(server)
    with stopped(server):
        for number, (_, writer) in enumerate(connections):
            # Some come to their end only when their begin was read; some have another right behind them.
            writer.write(request[: 100 + number] if number % 2 else request * 2)
    for number, (_, writer) in enumerate(connections):
        if number % 2:
            writer.write(request[100 + number :])
    opened = set()
    for number, (reader, writer) in enumerate(connections):
        for _ in range(1 if number % 2 else 2):
            status, content = await _answer(reader)
            assert status == 201, content
            opened.add(json.loads(content)["session_id"])
        writer.close()
    assert len(opened) == _MANY * 3 // 2
    async with server.http() as client:
        closed = [await client.delete(f"/v1/sessions/{each}") for each in opened]
    assert {each.status_code for each in closed} == {204}


async def test_sockets_that_are_opened_at_once_are_all_served(server: Server) -> None:
    connections = await _connections(server)
    with stopped(server):
        for _, writer in connections:
            writer.write(_HANDSHAKE)
    for reader, _ in connections:
        assert b" 101 " in await reader.readuntil(b"\r\n\r\n")
    with stopped(server):
        for _, writer in connections:
            writer.write(_FRAME * 3)
    for reader, writer in connections:
        for _ in range(3):
            length = (await reader.readexactly(2))[1]
            assert json.loads(await reader.readexactly(length)) == {"id": 1, "ok": {}}
        writer.close()


async def test_who_goes_away_in_a_burst_keeps_nobody(server: Server) -> None:
    connections = await _connections(server)
    with stopped(server):
        for number, (_, writer) in enumerate(connections):
            writer.write(_HANDSHAKE if number % 4 == 1 else b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            if number % 2:
                writer.transport.abort()
    for number, (reader, writer) in enumerate(connections):
        if number % 2 == 0:
            assert (await _answer(reader))[0] == 200
            writer.close()
    async with server.http() as client:
        assert (await client.get("/health")).status_code == 200
