"""Servers that the clients' tests start, kill and start again, and a proxy that breaks connections."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from tests.support.preloaded import Forked
from tests.support.processes import end, start_server

INLINE = ("Walk", "Dice", "Arm")
ENVS = (
    *(
        part
        for name in (*INLINE, "Slow", "Spelling")
        for part in ("--env", f"{name}-v0=tests.support.client_envs:{name}")
    ),
    *(part for name in INLINE for part in ("--isolation", f"{name}-v0=inline")),
    *(
        part
        for isolation in ("inline", "thread", "process")
        for part in (
            *("--env", f"Drift-{isolation}=tests.support.client_envs:Drift"),
            *("--isolation", f"Drift-{isolation}={isolation}"),
        )
    ),
)


class ServerProcess:
    """A real server on one port for all its lives."""

    def __init__(self, arguments: Sequence[str] = ENVS) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.arguments = list(arguments)
        self._process: Forked | subprocess.Popen[str] | None = None

    def start(self) -> ServerProcess:
        self._process = start_server("--port", str(self.port), *self.arguments)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if "serving on" not in line:
            self.stop()
            raise RuntimeError(f"the server did not start: {line!r}")
        return self

    @property
    def pid(self) -> int:
        """Its process id, while it runs."""
        assert self._process is not None
        return self._process.pid

    def children(self) -> list[int]:
        """The ids of the processes that it has started and that run."""
        assert self._process is not None
        listed = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text()
        return [int(each) for each in listed.split()]

    def pause(self) -> None:
        """Let it do nothing, as a machine that is too busy."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it as a crash would."""
        assert self._process is not None
        self._process.kill()
        self._finish()

    def stop(self) -> None:
        """End it as an operator would."""
        self._finish()

    def _finish(self) -> None:
        assert self._process is not None
        with self._process as process:
            self._process = None
            end(process)

    def __enter__(self) -> ServerProcess:
        return self.start()

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self.stop()


class Proxy:
    """A TCP proxy before a server, which can lose replies and cut connections.

    Attributes:
        stands_still_s: How long it passes nothing on once the next connection is there.
    """

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self.stands_still_s = 0.0
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.loses_replies = False
        self.requests_passed = asyncio.Event()
        self.connections = 0
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        self._writers |= {writer, up_writer}
        if seconds := self.stands_still_s:
            self.stands_still_s = 0.0
            await asyncio.sleep(seconds)
        pumps = (
            asyncio.ensure_future(self._pump(reader, up_writer, is_reply=False)),
            asyncio.ensure_future(self._pump(up_reader, writer, is_reply=True)),
        )
        self._tasks |= set(pumps)
        await asyncio.wait(pumps)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_reply: bool
    ) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(65536):
                if is_reply and self.loses_replies:
                    self.requests_passed.set()
                    continue
                writer.write(data)
                await writer.drain()
        writer.close()

    def cut(self) -> None:
        """Break all connections, without a goodbye."""
        self.loses_replies = False
        self.requests_passed.clear()
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def lose_next_reply(self) -> None:
        """Wait until a request has been answered by the server, and cut before the client sees it."""
        self.loses_replies = True
        await self.requests_passed.wait()
        self.cut()


@asynccontextmanager
async def proxy_before(server: ServerProcess) -> AsyncIterator[Proxy]:
    proxy = Proxy(server.port)
    listener = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    try:
        yield proxy
    finally:
        proxy.cut()
        listener.close()
