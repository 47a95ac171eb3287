"""A Redis server of a test's own, which can be slow, full, killed and started anew."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Self

import pytest

_PATIENCE_S = 20.0


def program() -> str:
    """The program, or the one that `ROLLGYM_REDIS_SERVER` names; a test is skipped without it, and fails in CI."""
    named = os.environ.get("ROLLGYM_REDIS_SERVER")
    found = shutil.which(named or "redis-server") or (None if named else shutil.which("valkey-server"))
    if found is None:
        if os.environ.get("CI"):
            pytest.fail("these tests need redis-server (apt-get install redis-server)")
        pytest.skip("these tests need redis-server (apt-get install redis-server)")
    return found


class RedisServer:
    """A server on one port for all its lives, which keeps its data in a directory.

    Args:
        directory: Where it keeps its data.
        *settings: More of its settings, as on its command line.
    """

    def __init__(self, directory: Path, *settings: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._arguments = [
            *(program(), "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(directory)),
            *("--save", "", "--appendonly", "yes", "--appendfsync", "always", *settings),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> Self:
        self._process = subprocess.Popen(self._arguments, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + _PATIENCE_S
        while self.ask("PING") != b"+PONG":
            assert time.monotonic() < deadline, "redis-server does not answer"
            time.sleep(0.02)
        return self

    def kill(self) -> None:
        """End it as a crash would."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(_PATIENCE_S)
        self._process = None

    def pause(self) -> None:
        """Let it answer nothing, with its connections open."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def take_port(self, port: int) -> None:
        """Listen on the port of a server that is gone, and follow none any more."""
        assert self.ask("REPLICAOF", "NO", "ONE") == b"+OK"
        assert self.ask("CONFIG", "SET", "port", str(port)) == b"+OK"
        self.port = port
        self.url = f"redis://127.0.0.1:{port}/0"

    def ask(self, *words: str) -> bytes:
        """The first line of the answer to a command; nothing where none comes. Each character is one byte."""
        frame = "".join(f"${len(word)}\r\n{word}\r\n" for word in words)
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=5) as connection:
                connection.sendall(f"*{len(words)}\r\n{frame}".encode("latin-1"))
                return connection.recv(65536).partition(b"\r\n")[0]
        except OSError:
            return b""

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self.resume()
            self.kill()
