"""How long a burst holds the event loop: python benchmarks/serving/bursts.py [--before CHECKOUT] [--out FILE].

Many clients ask once, each on a connection of its own, while the server is stopped (SIGSTOP); when it goes on, all of
it is there in one turn of its loop. What is measured is the longest turn, in CPU of the loop's own thread, and how long
it takes until all are answered. Over HTTP and by sockets, at a server and at a gateway before one.
"""

import argparse
import asyncio
import itertools
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import processes
from rounds import shown, table
from turn_meter import NOTED
from turns import wait_for

from rollgym.clients.net.connection import open_socket
from rollgym.clients.protocol.frames import SUBPROTOCOLS, dumps, loads

ENV_ID = "FrozenLake-v0"
KWARGS = {"map": ["SFF", "FHF", "FFG"], "max_episode_steps": 10**6}
WORDS = ["--port", "0", "--workers", "1", "--log-level", "error", "--max-queue-s", "60"]
PLAIN = [sys.executable, "-m", "rollgym.env_server", *WORDS]
GATEWAY = ["--gateway", "--allow-network", "loopback"]


class Asking:
    """One client over HTTP: a connection, and a session that it steps."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._path = ""

    async def make(self) -> None:
        self.ask("/v1/sessions", {"env_id": ENV_ID, "kwargs": KWARGS, "reset": {"seed": 1}})
        self._path = f"/v1/sessions/{loads(await self.answer(), binary=False)['session_id']}/step"

    def step(self) -> None:
        self.ask(self._path, {"action": "Left", "autoreset": True})

    def ask(self, path: str, body: Any) -> None:
        content = dumps(body, binary=False)
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        self._writer.write(head.encode() + f"Content-Length: {len(content)}\r\n\r\n".encode() + content)

    async def answer(self) -> bytes:
        head = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        length = int(head.partition(b"content-length:")[2].split()[0])
        content = await self._reader.readexactly(length)
        if b" 20" not in head[:12]:
            raise SystemExit(content.decode())
        return content


class Framing:
    """One client by a socket of its own, and a session that it steps."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._answers: asyncio.Queue[bytes] = asyncio.Queue()
        self._session_id = ""
        connection.on_message = self._answers.put_nowait

    async def make(self) -> None:
        self._ask("make", {"env_id": ENV_ID, "kwargs": KWARGS, "reset": {"seed": 1}})
        self._session_id = loads(await self.answer(), binary=False)["ok"]["session_id"]

    def step(self) -> None:
        self._ask("step", {"session_id": self._session_id, "action": "Left", "autoreset": True})

    def _ask(self, op: str, fields: dict[str, Any]) -> None:
        self._connection.send(dumps({"id": 1, "op": op, **fields}, binary=False), binary=False)

    async def answer(self) -> bytes:
        content = await self._answers.get()
        if b'"error"' in content:
            raise SystemExit(content.decode())
        return content


@asynccontextmanager
async def over_http(port: int) -> AsyncIterator[Asking]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield Asking(reader, writer)
    finally:
        writer.close()


@asynccontextmanager
async def by_socket(port: int) -> AsyncIterator[Framing]:
    url = f"ws://127.0.0.1:{port}/v1/ws"
    connection = await open_socket(url, headers={}, subprotocol=SUBPROTOCOLS[False], timeout_s=30)
    try:
        yield Framing(connection)
    finally:
        connection.abort()


WAYS = {over_http: "over HTTP", by_socket: "by sockets"}


async def bursts(
    server: processes.Server, noted: Path, way: Any, clients: int, rounds: int
) -> dict[str, float]:
    """Medians and extremes of so many bursts."""
    longest, seconds = [], []
    async with AsyncExitStack() as stack:
        players = [await stack.enter_async_context(way(server.port)) for _ in range(clients)]
        for player in players:
            await player.make()
        for _ in range(rounds + 1):
            os.kill(server.pid, signal.SIGSTOP)
            _forget(noted)
            for player in players:
                player.step()
            # What is written to a socket that has room is with the kernel at once.
            began = time.perf_counter()
            os.kill(server.pid, signal.SIGCONT)
            await asyncio.gather(*(player.answer() for player in players))
            seconds.append(time.perf_counter() - began)
            longest.append(NOTED.unpack(noted.read_bytes())[0])
    # The first is warmed up by none.
    return {
        "longest_turn_ms": statistics.median(longest[1:]) * 1000,
        "longest_turn_of_all_ms": max(longest[1:]) * 1000,
        "all_answered_ms": statistics.median(seconds[1:]) * 1000,
    }


def _forget(noted: Path) -> None:
    """Begin anew; the file is not made shorter under who has it in memory."""
    with noted.open("r+b") as file:
        file.write(bytes(NOTED.size))


def measured(who: str, noted: Path, way: Any, clients: int, rounds: int, root: Path) -> dict[str, float]:
    """Bursts at a server of its own."""
    metered = [sys.executable, str(Path(__file__).with_name("turn_meter.py")), str(noted), *WORDS]
    if who == "server":
        with processes.server(metered, root) as server:
            return asyncio.run(bursts(server, noted, way, clients, rounds))
    with processes.server([*metered, *GATEWAY], root) as gateway:
        url = f"http://127.0.0.1:{gateway.port}"
        with processes.server([*PLAIN, "--register", url], root):
            asyncio.run(wait_for(url))
            return asyncio.run(bursts(gateway, noted, way, clients, rounds))


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--clients", type=int, nargs="+", default=[50, 200, 800])
    options.add_argument("--rounds", type=int, default=15, help="bursts of each case")
    options.add_argument("--before", type=Path, help="another checkout, whose servers are measured, too")
    options.add_argument("--out", type=Path, help="JSON file for the result")
    chosen = options.parse_args()
    processes.allow_many_files()
    processes.pin_load()
    roots = {"now": processes.ROOT} | ({} if chosen.before is None else {"before": chosen.before.absolute()})
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        noted = Path(folder, "noted")
        noted.write_bytes(bytes(NOTED.size))
        for who, way, clients in itertools.product(
            ("server", "gateway"), (over_http, by_socket), chosen.clients
        ):
            for what, root in roots.items():
                found = measured(who, noted, way, clients, chosen.rounds, root)
                rows.append({"who": f"{who}, {WAYS[way]}", "what": what, "clients": clients} | found)
                print(rows[-1], flush=True)
    heads = ("who", "what", "clients", *found)
    print(
        table(
            heads, [[shown(each[head]) if head in found else each[head] for head in heads] for each in rows]
        )
    )
    if chosen.out is not None:
        command = "python benchmarks/serving/bursts.py" + (" --before ../before" if chosen.before else "")
        result = {"command": command, **processes.machine(), "rounds": chosen.rounds, "rows": rows}
        chosen.out.write_text(
            json.dumps(result | {"load_average": processes.load_average()}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
