"""A closed-loop WebSocket client that costs little: raw frames, encoded once, and a counter of answers."""

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import orjson

_KEY = "dGhlIHNhbXBsZSBub25jZQ=="
_TEXT = 0x81


def text_frame(content: bytes) -> bytes:
    """A masked text frame; the mask is zero, so the content stays as it is."""
    size = len(content)
    if size < 126:
        head = bytes((_TEXT, 0x80 | size))
    elif size < 65536:
        head = bytes((_TEXT, 0x80 | 126)) + size.to_bytes(2, "big")
    else:
        head = bytes((_TEXT, 0x80 | 127)) + size.to_bytes(8, "big")
    return head + b"\0\0\0\0" + content


class FrameProtocol(asyncio.Protocol):
    """One socket: calls back with each complete text message."""

    def __init__(self, path: str, on_message: Callable[["FrameProtocol", bytes], None]) -> None:
        self._path = path
        self._on_message = on_message
        self._buffer = b""
        self._upgraded = False
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.transport: asyncio.Transport

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        transport.write(
            f"GET {self._path} HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Key: {_KEY}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
        )

    def data_received(self, data: bytes) -> None:
        data = self._buffer + data if self._buffer else data
        if not self._upgraded:
            head, found, data = data.partition(b"\r\n\r\n")
            if not found:
                self._buffer = head
                return
            assert b" 101 " in head, head
            self._upgraded = True
            self.ready.set_result(None)
        start, end = 0, len(data)
        while end - start >= 2:
            size, body = data[start + 1], start + 2
            if size == 126:
                if end - start < 4:
                    break
                size, body = int.from_bytes(data[start + 2 : start + 4], "big"), start + 4
            elif size == 127:
                if end - start < 10:
                    break
                size, body = int.from_bytes(data[start + 2 : start + 10], "big"), start + 10
            if end - body < size:
                break
            self._on_message(self, data[body : body + size])
            start = body + size
        self._buffer = data[start:]


@dataclass
class Measurement:
    """What one case gave."""

    steps: int = 0
    seconds: float = 0.0
    server_cpu_seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        ordered = sorted(self.latencies)
        return {
            "steps_per_s": round(self.steps / self.seconds),
            "server_cpu_us_per_step": round(1e6 * self.server_cpu_seconds / self.steps, 1),
            "p50_ms": round(1e3 * ordered[len(ordered) // 2], 3),
            "p99_ms": round(1e3 * ordered[int(len(ordered) * 0.99)], 3),
        }


async def open_socket(
    port: int, on_message: Callable[[FrameProtocol, bytes], None], path: str = "/v1/ws"
) -> FrameProtocol:
    loop = asyncio.get_running_loop()
    _, protocol = await loop.create_connection(lambda: FrameProtocol(path, on_message), "127.0.0.1", port)
    await protocol.ready
    return protocol


async def ask(port: int, frames: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Send frames over one socket and wait for their answers, one after another; the socket stays open."""
    answers: list[dict[str, Any]] = []
    done = asyncio.get_running_loop().create_future()

    def on_message(protocol: FrameProtocol, message: bytes) -> None:
        answers.append(orjson.loads(message))
        if len(answers) == len(frames):
            done.set_result(None)
        else:
            protocol.transport.write(text_frame(orjson.dumps(frames[len(answers)])))

    protocol = await open_socket(port, on_message)
    protocol.transport.write(text_frame(orjson.dumps(frames[0])))
    await done
    return answers


async def closed_loop(
    port: int,
    frames: list[bytes],
    pid: int,
    *,
    steps_per_frame: int,
    warm_up_s: float = 0.5,
    seconds: float = 3.0,
) -> Measurement:
    """One socket for each frame; every socket sends its frame again as soon as it is answered."""
    measurement = Measurement()
    sent: dict[FrameProtocol, float] = {}
    state = {"counting": False}
    payload: dict[FrameProtocol, bytes] = {}
    clock = time.perf_counter

    def on_message(protocol: FrameProtocol, message: bytes) -> None:
        now = clock()
        if state["counting"]:
            measurement.steps += steps_per_frame
            measurement.latencies.append(now - sent[protocol])
        sent[protocol] = now
        protocol.transport.write(payload[protocol])

    sockets = []
    for frame in frames:
        protocol = await open_socket(port, on_message)
        payload[protocol] = text_frame(frame)
        sockets.append(protocol)
    for protocol in sockets:
        sent[protocol] = clock()
        protocol.transport.write(payload[protocol])
    await asyncio.sleep(warm_up_s)
    cpu, started = cpu_seconds(pid), clock()
    state["counting"] = True
    await asyncio.sleep(seconds)
    state["counting"] = False
    measurement.seconds = clock() - started
    measurement.server_cpu_seconds = cpu_seconds(pid) - cpu
    for protocol in sockets:
        protocol.transport.abort()
    return measurement


def cpu_seconds(pid: int) -> float:
    """CPU time of a process and of its living descendants."""
    total = 0.0
    for member in _tree(pid):
        with open(f"/proc/{member}/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()
        total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def resident_kib(pid: int) -> int:
    """Resident memory of a process and of its living descendants."""
    total = 0
    for member in _tree(pid):
        with open(f"/proc/{member}/statm", "rb") as statm:
            total += int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024
    return total


def _tree(pid: int) -> list[int]:
    members = [pid]
    for member in members:
        for task in os.listdir(f"/proc/{member}/task"):
            with open(f"/proc/{member}/task/{task}/children") as children:
                members.extend(int(child) for child in children.read().split())
    return members
