"""A closed-loop load generator that costs little: raw frames or HTTP requests, and a counter of answers."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from processes import cpu_seconds
from wire import Session

_KEY = "dGhlIHNhbXBsZSBub25jZQ=="
_TEXT = 0x81
_DIALLED_AT_ONCE = 64


@dataclass
class Measurement:
    """What one case gave."""

    steps: int = 0
    seconds: float = 0.0
    server_cpu_seconds: float = 0.0
    load_cpu_seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, float]:
        ordered = sorted(self.latencies)
        return {
            "steps_per_s": round(self.steps / self.seconds),
            "server_cpu_us_per_step": round(1e6 * self.server_cpu_seconds / self.steps, 1),
            "load_cpu_us_per_step": round(1e6 * self.load_cpu_seconds / self.steps, 1),
            "p50_ms": round(1e3 * ordered[len(ordered) // 2], 3),
            "p99_ms": round(1e3 * ordered[int(len(ordered) * 0.99)], 3),
        }


class Load:
    """Counts the answers of all connections, and learns when one of them fails.

    Args:
        sessions: How many sessions there will be.
        hold: Whether each session stops after its first step.
    """

    def __init__(self, sessions: int, *, hold: bool = False) -> None:
        loop = asyncio.get_running_loop()
        self.stepped: asyncio.Future[None] = loop.create_future()
        self.failed: asyncio.Future[None] = loop.create_future()
        self.counting = False
        self.measurement = Measurement()
        self.hold = hold
        self._waiting = sessions

    def first_step(self) -> None:
        self._waiting -= 1
        if self._waiting == 0:
            self.stepped.set_result(None)

    def fail(self, error: Exception) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)
            self.failed.exception()  # connections that are closed in the end fail as well, and nobody asks then


class Slot:
    """One session and the request that it waits for."""

    def __init__(self, load: Load, session: Session) -> None:
        self._load = load
        self._session = session
        self._fresh = True
        self._steps, self.request = next(session)
        self._sent = time.perf_counter()

    def take(self, answer: bytes) -> bytes:
        """Count an answer; gives the next request, or nothing if the session shall rest."""
        load = self._load
        now = time.perf_counter()
        if self._steps:
            if load.counting:
                load.measurement.steps += self._steps
                load.measurement.latencies.append(now - self._sent)
            if self._fresh:
                self._fresh = False
                load.first_step()
                if load.hold:
                    return b""
        self._steps, request = self._session.send(answer)
        self._sent = time.perf_counter()
        return request


class Connection(asyncio.Protocol):
    """One connection; several sessions share it if their answers begin with the id, which is the session's index."""

    def __init__(self, load: Load, sessions: Sequence[Session]) -> None:
        self._load = load
        self._slots = [Slot(load, session) for session in sessions]
        self._buffer = b""
        self.transport: asyncio.Transport

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.begin()

    def data_received(self, data: bytes) -> None:
        try:
            answers = self.split(self._buffer + data if self._buffer else data)
            if len(self._slots) == 1:
                requests = [self._slots[0].take(answer) for answer in answers]
            else:
                requests = [
                    self._slots[int(answer[6 : answer.index(b",")])].take(answer) for answer in answers
                ]
            if requests:
                self.transport.write(b"".join(self.encode(request) for request in requests if request))
        except Exception as error:  # noqa: BLE001 - it is raised where the load is waited for
            self._load.fail(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self._load.fail(exc or ConnectionError("the server closed a connection"))

    def begin(self) -> None:
        self.begin_sessions()

    def begin_sessions(self) -> None:
        self.transport.write(b"".join(self.encode(slot.request) for slot in self._slots))

    def encode(self, request: bytes) -> bytes:
        return request

    def split(self, data: bytes) -> list[bytes]:
        """Return the whole answers, and keep the rest for later."""
        raise NotImplementedError


class HttpConnection(Connection):
    """HTTP/1.1 with keep-alive: one request at a time, answered with a length or in chunks."""

    def split(self, data: bytes) -> list[bytes]:
        end = data.find(b"\r\n\r\n")
        if end >= 0:
            head = data[:end].lower()
            at = head.find(b"content-length: ")
            if at >= 0:
                length = int(head[at + 16 :].partition(b"\r\n")[0])
                whole = len(data) - end - 4 >= length
            else:
                whole = data.endswith(b"0\r\n\r\n") and b"\r\ntransfer-encoding: chunked" in head
            if whole:
                if data[9:12] not in (b"200", b"201"):
                    raise RuntimeError(f"the server answered {data!r}")
                self._buffer = b""
                return [data]
        self._buffer = data
        return []


class SocketConnection(Connection):
    """A WebSocket: text frames with a mask of zero, which leaves the content as it is."""

    path = "/ws"
    _upgraded = False

    def begin(self) -> None:
        self.transport.write(
            f"GET {self.path} HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Key: {_KEY}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
        )

    def encode(self, request: bytes) -> bytes:
        size = len(request)
        if size < 126:
            head = bytes((_TEXT, 0x80 | size))
        elif size < 65536:
            head = bytes((_TEXT, 0x80 | 126)) + size.to_bytes(2, "big")
        else:
            head = bytes((_TEXT, 0x80 | 127)) + size.to_bytes(8, "big")
        return head + b"\0\0\0\0" + request

    def split(self, data: bytes) -> list[bytes]:
        if not self._upgraded:
            head, found, data = data.partition(b"\r\n\r\n")
            if not found:
                self._buffer = head
                return []
            if b" 101 " not in head:
                raise RuntimeError(f"the server answered {head!r}")
            self._upgraded = True
            self.begin_sessions()
        answers = []
        start, end = 0, len(data)
        while end - start >= 2:
            size, body = data[start + 1], start + 2
            if size == 126:
                size, body = int.from_bytes(data[start + 2 : start + 4], "big"), start + 4
            elif size == 127:
                size, body = int.from_bytes(data[start + 2 : start + 10], "big"), start + 10
            if end - body < size:
                break
            if data[start] == _TEXT:  # and no ping
                answers.append(data[body : body + size])
            start = body + size
        self._buffer = data[start:]
        return answers


class OwnSocketConnection(SocketConnection):
    path = "/v1/ws"


async def open_all(
    port: int, kind: type[Connection], load: Load, groups: Sequence[Sequence[Session]]
) -> list[Connection]:
    """Open one connection for each group of sessions; each begins at once."""
    loop = asyncio.get_running_loop()
    connections: list[Connection] = []
    for start in range(0, len(groups), _DIALLED_AT_ONCE):
        dials = [
            loop.create_connection(lambda group=group: kind(load, group), "127.0.0.1", port)
            for group in groups[start : start + _DIALLED_AT_ONCE]
        ]
        connections += [protocol for _, protocol in await asyncio.gather(*dials)]
    return connections


async def run_load(
    port: int,
    pid: int,
    kind: type[Connection],
    groups: Sequence[Sequence[Session]],
    *,
    warm_up_s: float = 0.5,
    seconds: float = 2.0,
) -> Measurement:
    """Keep one request of every session in flight, and measure for some seconds once all have stepped."""
    load = Load(sum(map(len, groups)))
    connections = await open_all(port, kind, load, groups)
    try:
        await _first(load.stepped, load.failed)
        await _pause(warm_up_s, load.failed)
        measurement = load.measurement
        cpu, own_cpu, started = cpu_seconds(pid), time.process_time(), time.perf_counter()
        load.counting = True
        await _pause(seconds, load.failed)
        load.counting = False
        measurement.seconds = time.perf_counter() - started
        measurement.server_cpu_seconds = cpu_seconds(pid) - cpu
        measurement.load_cpu_seconds = time.process_time() - own_cpu
    finally:
        close(connections)
    return measurement


async def hold_sessions(
    port: int, kind: type[Connection], groups: Sequence[Sequence[Session]]
) -> list[Connection]:
    """Open sessions, take one step in each, and leave them open."""
    load = Load(sum(map(len, groups)), hold=True)
    connections = await open_all(port, kind, load, groups)
    await _first(load.stepped, load.failed)
    return connections


def close(connections: Sequence[Connection]) -> None:
    for connection in connections:
        connection.transport.abort()


async def _first(wanted: asyncio.Future[None], failed: asyncio.Future[None]) -> None:
    await asyncio.wait((wanted, failed), timeout=120, return_when=asyncio.FIRST_COMPLETED)
    if failed.done():
        failed.result()
    if not wanted.done():
        raise TimeoutError("the sessions did not all take their first step in 120 s")


async def _pause(seconds: float, failed: asyncio.Future[None]) -> None:
    await asyncio.wait((failed,), timeout=seconds)
    if failed.done():
        failed.result()
