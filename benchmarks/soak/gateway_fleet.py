"""The servers of a soak of gateways, the journal that these share, and who kills them."""

import argparse
import asyncio
import contextlib
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
from progress import Progress
from run import Server

GAMES: dict[str, dict[str, Any]] = {"FrozenLake-v0": {}, "Slippery-v0": {"is_slippery": True}}
SERVED = (
    *("--no-builtin", "--env", "FrozenLake-v0=rollgym.envs.games.frozen_lake:FrozenLakeEnv"),
    *(
        "--env",
        "Slippery-v0=rollgym.envs.games.frozen_lake:FrozenLakeEnv",
        "--isolation",
        "Slippery-v0=process",
    ),
)
GATEWAYS, NODES = 3, 4
_MOST_STARTS = 60


class Journal(Server):
    """A Redis server that writes everything to disk before it answers."""

    def __init__(self, place: str) -> None:
        super().__init__([])
        program = shutil.which("redis-server") or shutil.which("valkey-server")
        if program is None:
            raise SystemExit("this needs redis-server (apt-get install redis-server)")
        self.command = [
            program,
            "--dir",
            place,
            "--save",
            "",
            "--appendonly",
            "yes",
            "--appendfsync",
            "always",
        ]

    def start(self) -> "Journal":
        if not self.port:
            with socket.create_server(("127.0.0.1", 0)) as free:
                self.port = free.getsockname()[1]
        command = [*self.command, "--port", str(self.port), "--bind", "127.0.0.1"]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, text=True, start_new_session=True)
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port)).close()
                return self
            except ConnectionError:
                time.sleep(0.02)


class Fleet:
    """The servers, and what is done to them.

    Args:
        place: A directory for all of them.
        journal: The journal's server, which has been started.
        served: Options of the nodes.
        games: Their environments.
        gateway_options: More options of the gateways.

    Attributes:
        kinds: What is killed at random.
    """

    kinds: tuple[str, ...] = ("gateway",) * GATEWAYS + ("node",) * NODES

    def __init__(
        self,
        place: str,
        *,
        journal: Any = None,
        served: Sequence[str] = (*SERVED, "--workers", "1"),
        games: Sequence[str] = tuple(GAMES),
        gateway_options: Sequence[str] = (),
    ) -> None:
        self._games = games
        self.journal = journal or Journal(place).start()
        shared = ("--gateway", "--allow-network", "loopback", "--linger-s", "5", *gateway_options)
        url = f"redis://127.0.0.1:{self.journal.port}/0"
        self.gateways = [
            Server([*shared, "--journal-url", url, "--state-dir", f"{place}/gateway-{number}"])
            for number in range(GATEWAYS)
        ]
        with ThreadPoolExecutor() as starting:
            list(starting.map(Server.start, self.gateways))
            register = [part for gateway in self.gateways for part in ("--register", gateway.url)]
            # Half of the nodes come back with what they had, and half with nothing.
            states = [
                ("--state-dir", f"{place}/node-{number}") if number % 2 else () for number in range(NODES)
            ]
            self.nodes = [Server([*served, *register, *state]) for state in states]
            list(starting.map(Server.start, self.nodes))

    def stop(self) -> None:
        for server in (*self.nodes, *self.gateways, self.journal):
            with contextlib.suppress(AssertionError):
                server.kill(signal.SIGKILL)

    async def whole(self) -> None:
        """Wait until all nodes are registered with all gateways."""
        async with httpx.AsyncClient() as http:
            for gateway in self.gateways:
                while True:
                    with contextlib.suppress(httpx.TransportError, KeyError):
                        found = (await http.get(f"{gateway.url}/v1/envs")).json()["envs"]
                        if [env["replicas"] for env in found] == [NODES] * len(self._games):
                            break
                    await asyncio.sleep(0.1)

    def plan(self, options: argparse.Namespace, chance: random.Random) -> list[tuple[float, str, float]]:
        """When what is killed: after so many seconds, a kind, and which one of that, from 0 to 1."""
        seconds = 60 * options.minutes
        plan = [
            (
                seconds * (number + chance.random()) / options.kills,
                chance.choice(self.kinds),
                chance.random(),
            )
            for number in range(options.kills)
        ]
        plan += [
            (seconds * (number + chance.random()) / options.journal_kills, "journal", 0.0)
            for number in range(options.journal_kills)
        ]
        return plan

    async def fire(self, options: argparse.Namespace, progress: Progress) -> None:
        """Kill at random times, evenly spread over the whole run, and start what was killed again."""
        chance = random.Random(progress.seed)
        plan = self.plan(options, chance)
        begun = time.monotonic() - progress.seconds
        coming_back: dict[Server, asyncio.Task[None]] = {}
        for at_s, kind, which in sorted(plan):
            if at_s < progress.seconds:
                continue
            await asyncio.sleep(max(0.0, begun + at_s - time.monotonic()))
            # One whose start takes long is not there yet: killed in it, it would be started twice on one port.
            while not (able := self._able(kind, away := _unfinished(coming_back))):
                await asyncio.wait(away.values(), return_when=asyncio.FIRST_COMPLETED)
            victim = await self.strike(kind, which, able)
            progress.kills[kind] = progress.kills.get(kind, 0) + 1
            if victim is not None:
                pause = min(chance.uniform(0.0, 5.0), 6 * options.minutes)
                coming_back[victim] = asyncio.create_task(_back(victim, pause))
        await asyncio.gather(*coming_back.values())

    async def strike(self, kind: str, which: float, able: list[Server]) -> Server | None:
        """Kill one of these; gives the server that has to be started again, if one has.

        Args:
            kind: What is killed.
            which: Which of them, from 0 to 1.
            able: The servers that can be killed, or whose processes can.
        """
        victim = able[int(which * len(able))]
        await asyncio.to_thread(victim.kill)
        victim.process = None
        return victim

    def _able(self, kind: str, away: Collection[Server]) -> list[Server]:
        """The servers of a kind that can be killed; none where half of them are away already."""
        servers = self._of(kind)
        able = [each for each in servers if each not in away]
        return able if 2 * len(able) > len(servers) else []

    def _of(self, kind: str) -> list[Server]:
        return {"gateway": self.gateways, "journal": [self.journal]}.get(kind, self.nodes)


def _unfinished(tasks: "dict[Server, asyncio.Task[None]]") -> "dict[Server, asyncio.Task[None]]":
    return {server: task for server, task in tasks.items() if not task.done()}


async def _back(victim: Server, pause_s: float) -> None:
    await asyncio.sleep(pause_s)
    for _ in range(_MOST_STARTS):
        try:
            await asyncio.to_thread(victim.start)
        except ValueError:
            # Another process may have been given its port for a connection while it was away.
            print(f"the server on port {victim.port} did not start; trying again", flush=True)
            await asyncio.sleep(1.0)
        else:
            return
    raise RuntimeError(f"the server on port {victim.port} does not start")
