"""Gateways whose shared journal is damaged: a Redis server, and its append-only file."""

import asyncio
import random
import shutil
import socket
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx
import redis.asyncio
import uvicorn
from damaged_sessions import ENV_ID, LEDGER, Seen, played

import rollgym
from tests.support.journal_damage import damaged

_PATIENCE_S = 60.0


class Redis:
    """A Redis server on one port, and its append-only file.

    Args:
        place: Its directory.
    """

    def __init__(self, place: Path) -> None:
        program = shutil.which("redis-server") or shutil.which("valkey-server")
        if program is None:
            raise SystemExit("this needs redis-server (apt-get install redis-server)")
        self._check = shutil.which("redis-check-aof") or shutil.which("valkey-check-aof")
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self._port}/0"
        self._place = place
        self._command = [
            *(program, "--port", str(self._port), "--bind", "127.0.0.1", "--dir", str(place)),
            *("--save", "", "--appendonly", "yes", "--appendfsync", "no"),
        ]
        self._process: asyncio.subprocess.Process | None = None

    @property
    def file(self) -> Path:
        """What was written since it was started first."""
        (found,) = self._place.glob("appendonlydir/*.incr.aof")
        return found

    async def start(self) -> bool:
        """Start it; whether it answers."""
        self._process = await asyncio.create_subprocess_exec(*self._command, stdout=subprocess.DEVNULL)
        async with redis.asyncio.Redis(port=self._port) as client, asyncio.timeout(_PATIENCE_S):
            while self._process.returncode is None:
                try:
                    await client.ping()
                except redis.exceptions.ConnectionError:
                    await asyncio.sleep(0.02)
                else:
                    return True
        return False

    async def mend(self) -> None:
        """Cut off what cannot be read, as an operator does."""
        assert self._check is not None
        process = await asyncio.create_subprocess_exec(
            *(self._check, "--fix", str(self.file)), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
        )
        await process.communicate(b"y\n")

    async def kill(self) -> None:
        """End it as a crash does."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


def records(content: bytes) -> list[int]:
    """Where commands begin and end; those that are carried out together are one."""
    ends, at, together = [0], 0, False
    while at < len(content):
        word_count, at = _number(content, at)
        words = []
        for _ in range(word_count):
            size, at = _number(content, at)
            words.append(content[at : at + size])
            at += size + 2
        if words[0] == b"MULTI":
            together = True
        elif words[0] == b"EXEC":
            together = False
        if not together:
            ends.append(at)
    return ends


def _number(content: bytes, at: int) -> tuple[int, int]:
    end = content.index(b"\r\n", at)
    return int(content[at + 1 : end]), end + 2


def damage(path: Path, chance: random.Random) -> str:
    """Damage a file as disks and people do; gives how."""
    content = path.read_bytes()
    # The first record chooses a database.
    kind, content = damaged(content, records(content)[1:], chance)
    path.write_bytes(content)
    return kind


async def look_at_shared(seed: str) -> Seen:
    """Play through one gateway, damage the journal, lose the node, and look what another gateway makes of it."""
    chance, seen = random.Random(seed), Seen()
    with tempfile.TemporaryDirectory() as place:
        async with AsyncExitStack() as stack:
            journal = Redis(Path(place))
            stack.push_async_callback(journal.kill)
            assert await journal.start()
            gateways = [await stack.enter_async_context(_gateway(journal.url)) for _ in range(2)]
            async with _node() as url:
                for gateway in gateways:
                    await _register(gateway, url)
                sessions = await played(gateways[0], chance)
                await journal.kill()
                seen.kind = damage(journal.file, chance)
                if not await journal.start():
                    await journal.mend()
                    if not await journal.start():
                        # Gateways answer nothing until somebody has looked at it.
                        seen.answers["the journal does not start"] += len(sessions)
                        return seen
            url = await stack.enter_async_context(_node())
            for gateway in gateways:
                await _register(gateway, url)
            await asyncio.gather(*(session.look(gateways[1], seen) for session in sessions))
    return seen


@asynccontextmanager
async def _gateway(journal_url: str) -> AsyncIterator[httpx.AsyncClient]:
    app = rollgym.create_app(
        builtin=False, gateway=True, allow_network=["loopback"], journal_url=journal_url, workers=1
    )
    async with (
        app.lifespan(),
        httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://127.0.0.1", timeout=_PATIENCE_S
        ) as http,
    ):
        yield http


@asynccontextmanager
async def _node() -> AsyncIterator[str]:
    """A server without a journal of its own; gives its URL."""
    app = rollgym.create_app(**LEDGER)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1))
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            await serving


async def _register(gateway: httpx.AsyncClient, url: str) -> None:
    body = {"env_id": ENV_ID, "url": url, "protocol": "rollgym", "gateways": 2, "ttl_s": 600}
    async with asyncio.timeout(_PATIENCE_S):
        while True:
            answer = await gateway.post("/v1/envs", json=body)
            if answer.status_code == 201:
                return
            assert answer.status_code == 503, answer.text
            await asyncio.sleep(0.1)
