"""Frames that no client of ours sends: valid ones, mutated by a seeded generator, and bytes that are none at all."""

import asyncio
import json
import os
import random
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import msgpack

from rollgym.clients.protocol.errors import CODES
from tests.support.wire import Server

HANDSHAKE = (
    b"GET /v1/ws HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Protocol: %s\r\n\r\n"
)
OPS = (
    *("make", "reset", "step", "render", "cancel", "fork", "episode", "restore", "close", "verify", "envs"),
    *("info", "ping", "session", "batch", "auth", "register", "sessions", "metrics", "socket_dropped", ""),
)
FIELDS = (
    *(
        "id",
        "op",
        "ops",
        "env_id",
        "session_id",
        "session_ids",
        "kwargs",
        "count",
        "reset",
        "seed",
        "options",
    ),
    *(
        "request_id",
        "action",
        "episode",
        "step",
        "autoreset",
        "timeout_s",
        "items",
        "mode",
        "reseed",
        "token",
    ),
    *("idle_timeout_s", "__nd__", "__bytes__", "self", "process"),
)
TEXT, BINARY, CONTINUATION, CLOSE, PING, PONG = 1, 2, 0, 8, 9, 10


class Mutator:
    """Makes bad frames.

    Args:
        seed: Equal seeds make equal frames, for equal sessions.
        env_ids: Environments that are served.
    """

    def __init__(self, seed: int, env_ids: tuple[str, ...]) -> None:
        self.random = random.Random(seed)
        self._env_ids = env_ids
        self.sessions: list[str] = []

    def value(self, depth: int = 0) -> Any:
        """Something that JSON can hold, as a rule in the wrong place."""
        pick = self.random.randrange(16 if depth < 3 else 12)
        if pick == 12:
            return [self.value(depth + 1) for _ in range(self.random.randrange(4))]
        if pick == 13:
            return {
                self.random.choice(FIELDS): self.value(depth + 1) for _ in range(self.random.randrange(4))
            }
        if pick == 14:
            return {"__nd__": ["float32", [2, -1], self.value(depth + 1)]}
        if pick == 15:
            value: Any = self.value(3)
            for _ in range(self.random.choice((5, 210, 900))):
                value = [value]
            return value
        return self.random.choice(
            (
                *(None, True, False, 0, -1, 1, 2**31, 2**53, 2**63, 2**64 - 1, -(2**63), 0.5, -0.0, 1e308),
                *("", "a", "\x00", "é😀", "x" * 3000, "NaN", "../../etc/passwd", "0." + "0" * 32, "9999.x"),
                *(float("nan"), float("inf"), 1e-320, "<answer>Right</answer>", "a" * 128, "a" * 129),
            )
        )

    def operation(self, depth: int = 0) -> dict[str, Any]:
        """An operation as it should be."""
        op = self.random.choice(OPS)
        session_id = self.random.choice(self.sessions) if self.sessions else "0." + "0" * 32
        fields: dict[str, Any] = {"op": op}
        if op == "make":
            fields |= {"env_id": self.random.choice(self._env_ids), "count": self.random.choice((1, 2, 3))}
            if self.random.random() < 0.7:
                fields["reset"] = {"seed": self.random.randrange(100)}
            if self.random.random() < 0.3:
                fields["request_id"] = f"r{self.random.randrange(5)}"
        elif op == "verify":
            fields |= {"env_id": "Equal", "items": [{"response": "4", "answer": "4"}]}
        elif op == "batch" and depth < 2:
            fields["ops"] = [self.operation(depth + 1) for _ in range(self.random.randrange(5))]
        elif op == "restore":
            fields["episode"] = {"env_id": self.random.choice(self._env_ids), "env_version": "7"}
        elif op == "auth":
            fields["token"] = self.random.choice(("", "x", "roll_" + "a" * 43))
        elif op == "close":
            fields["session_ids"] = [session_id]
        elif op not in ("envs", "info", "ping"):
            fields["session_id"] = session_id
            if op == "step":
                fields |= {"action": "a", "autoreset": self.random.random() < 0.3}
                if self.random.random() < 0.5:
                    fields |= {"episode": self.random.randrange(2), "step": self.random.randrange(4)}
        return fields

    def frame(self) -> Any:
        """A frame that is nearly right."""
        frame: Any = {"id": self.random.randrange(50), **self.operation()}
        for _ in range(self.random.choice((0, 0, 0, 0, 1, 1, 2, 4))):
            pick = self.random.randrange(5)
            name = self.random.choice((*frame, *FIELDS))
            if pick == 0:
                frame.pop(name, None)
            elif pick == 1 and type(frame.get("ops")) is list:
                frame["ops"] = [*frame["ops"], self.value(), frame]
                frame = json.loads(
                    json.dumps({**frame, "ops": [*frame["ops"][:-1], {"op": "batch", "ops": []}]})
                )
            else:
                frame[name] = self.value()
        return self.value() if self.random.random() < 0.03 else frame

    def content(self, *, binary: bool) -> bytes:
        """A frame as bytes, some of which are damaged."""
        frame = self.frame()
        try:
            content = msgpack.packb(frame) if binary else json.dumps(frame).encode()
        except (ValueError, OverflowError, RecursionError):
            content = b"\x91" * 2000 if binary else b"[" * 2000
        pick = self.random.randrange(24)
        if pick == 0:
            content = content[: self.random.randrange(len(content) + 1)]
        elif pick == 1:
            at = self.random.randrange(len(content) + 1)
            content = content[:at] + self.random.randbytes(3) + content[at:]
        elif pick == 2:
            content = self.random.randbytes(self.random.randrange(60))
        elif pick == 3 and binary:
            extension = (
                b"\xd6\xff" + bytes(4),
                b"\xc7\x05\x07hello",
                b"\xdd\xff\xff\xff\xff",
                b"\xdf\xff\xff\xff\xff",
            )
            content = b"\x83\xa2id\x01\xa2op\xa4ping\xa1x" + self.random.choice(extension)
        elif pick == 4:
            content += content
        elif pick == 5 and not binary:
            content = b'{"id": 1, "id": 2, "op": "ping", "op": "make", "n": 1' + b"0" * 400 + b"}"
        return content

    def wire(self, content: bytes, *, binary: bool) -> bytes:
        """The bytes of a message on a WebSocket: whole, in parts, of the wrong kind, or broken."""
        kind = BINARY if binary else TEXT
        pick = self.random.randrange(100)
        if pick == 0:
            kind = TEXT if binary else BINARY
        if pick in (1, 2):
            cut = self.random.randrange(len(content) + 1)
            middle = _masked(PING, b"in between") if pick == 1 else b""
            return _masked(kind, content[:cut], end=False) + middle + _masked(CONTINUATION, content[cut:])
        if pick == 3:
            return _masked(kind, content) + _masked(self.random.choice((PING, PONG)), b"x" * 125)
        if pick == 4:
            return self.random.choice(
                (
                    _masked(CONTINUATION, content),  # of nothing
                    _masked(3, content),  # a kind that there is not
                    _masked(PING, b"x" * 126),  # too long for its kind
                    _masked(CLOSE, struct.pack("!H", 999)),
                    _masked(kind, content, end=False) + _masked(kind, content),
                    bytes([0x80 | kind, len(content) & 0x7F]) + content,  # not masked
                    bytes([0x80 | kind, 0x80 | 127]) + struct.pack("!Q", 2**62) + bytes(4),
                    bytes([0xC0 | kind, 0x80 | 1]) + bytes(5),  # a reserved bit
                )
            )
        return _masked(kind, content)


def _masked(kind: int, content: bytes, *, end: bool = True) -> bytes:
    """A frame whose mask is zeros."""
    size = len(content)
    head = bytes([(0x80 if end else 0) | kind])
    if size < 126:
        head += bytes([0x80 | size])
    elif size < 2**16:
        head += bytes([0x80 | 126]) + struct.pack("!H", size)
    else:
        head += bytes([0x80 | 127]) + struct.pack("!Q", size)
    return head + bytes(4) + content


class Fuzz:
    """Sends bad frames to a server, and looks at all that it answers.

    Attributes:
        sent: Messages sent.
        sockets: Sockets opened.
        codes: Answers by code; `ok` for good ones.
    """

    def __init__(self, server: Server, seed: int, env_ids: tuple[str, ...]) -> None:
        self._server = server
        self._mutator = Mutator(seed, env_ids)
        self.sent = 0
        self.sockets = 0
        self.codes: Counter[str] = Counter()

    async def run(self, messages: int) -> None:
        """Send so many messages, over as many sockets as they break."""
        goal = self.sent + messages
        while self.sent < goal:
            await self._socket(min(goal - self.sent, 200), binary=self._mutator.random.random() < 0.5)

    async def _socket(self, messages: int, *, binary: bool) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._server.port)
        self.sockets += 1
        writer.write(HANDSHAKE % (b"rollgym.v1.msgpack" if binary else b"rollgym.v1.json"))
        await reader.readuntil(b"\r\n\r\n")
        reading = asyncio.create_task(self._read(reader, binary=binary))
        try:
            for _ in range(messages):
                content = self._mutator.content(binary=binary)
                writer.write(self._mutator.wire(content, binary=binary))
                self.sent += 1
                await writer.drain()
                # Now and then, what was asked is waited for: sessions that were made can be used.
                await asyncio.sleep(0.02 if self.sent % 25 == 0 else 0)
                if reading.done():
                    break
            ending = self._mutator.random.randrange(3)
            if ending == 0 and writer.can_write_eof():
                writer.write_eof()
            elif ending == 1:
                writer.write(_masked(CLOSE, struct.pack("!H", 1000)))
            else:
                writer.close()
            async with asyncio.timeout(60):
                await reading
        except OSError:
            # The server has ended the socket first.
            await reading
        finally:
            writer.close()

    async def _read(self, reader: asyncio.StreamReader, *, binary: bool) -> None:
        """Take in answers until the socket ends; each is one of the protocol's."""
        try:
            while True:
                kind, size = await reader.readexactly(2)
                if size == 126:
                    (size,) = struct.unpack("!H", await reader.readexactly(2))
                elif size == 127:
                    (size,) = struct.unpack("!Q", await reader.readexactly(8))
                content = await reader.readexactly(size)
                if kind & 15 in (TEXT, BINARY):
                    self._look(msgpack.unpackb(content) if binary else json.loads(content))
        except (asyncio.IncompleteReadError, ConnectionError):
            return

    def _look(self, answer: dict[str, Any]) -> None:
        assert len(answer) == 2, answer
        assert "id" in answer, answer
        for result in answer.get("results", [answer]):
            if "error" in result:
                problem = result["error"]
                assert problem["status"] == CODES[problem["code"]], problem
                assert problem["code"] != "internal", problem
                assert "Traceback" not in str(problem), problem
                self.codes[problem["code"]] += 1
                continue
            self.codes["ok"] += 1
            made = result["ok"]
            for each in [made, *made.get("sessions", [])]:
                if isinstance(each, dict) and "session_id" in each and len(self._mutator.sessions) < 40:
                    self._mutator.sessions.append(each["session_id"])
        if len(self._mutator.sessions) >= 40:
            del self._mutator.sessions[:20]


def resident_mib(pid: int) -> float:
    """The memory that a process has in fact."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20
