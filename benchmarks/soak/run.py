"""A fleet under fire: python benchmarks/soak/run.py [--minutes 30] [--out FILE].

A gateway with three nodes serves many players while workers, I/O processes and whole nodes are killed (SIGKILL) one by
one. Afterwards the same episodes are played on a server that nobody disturbs, and every step is compared by digest.
What a client's library mends by itself (restoring an episode elsewhere) counts as a loss here, and so does a session
that is left at the gateway or at a node after all were closed.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np

from rollgym.clients.client.client import EnvClient
from rollgym.clients.measuring.revision import revision
from rollgym.clients.protocol.errors import ProblemError

ROOT = Path(__file__).resolve().parents[2]
# Inline, in worker processes, and one with its own randomness at each step.
GAMES = ("FrozenLake-v0", "Sokoban-v0", "Slippery-v0")
ACTIONS = ("Left", "Down", "Right", "Up")
SERVED = (
    "--env",
    "Slippery-v0=rollgym.envs.games.frozen_lake:FrozenLakeEnv",
    "--isolation",
    "Slippery-v0=process",
)
KWARGS: dict[str, dict[str, Any]] = {"Slippery-v0": {"is_slippery": True}}
LONGEST = 40
# A session whose make was answered to nobody ends so long after the last socket that used it.
LINGER_S = 15.0
SETTLE_S = 2 * LINGER_S


class Task(NamedTuple):
    """One episode: its game, its seed, and, from that, its actions."""

    game: str
    seed: int

    def actions(self) -> list[str]:
        return [ACTIONS[number] for number in np.random.default_rng(self.seed).integers(0, 4, LONGEST)]


class Server:
    """A server in a process group of its own, on one port for all its lives."""

    def __init__(self, arguments: list[str]) -> None:
        self.arguments = arguments
        self.port = 0
        self.process: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> "Server":
        self.process = subprocess.Popen(
            [
                *(
                    sys.executable,
                    "-m",
                    "rollgym.env_server",
                    "--port",
                    str(self.port),
                    "--log-level",
                    "error",
                ),
                *self.arguments,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.port = int(line.strip().rpartition(":")[2].split("/")[0])
        return self

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)
        self.process.wait(60)

    def descendants(self) -> dict[str, list[int]]:
        """Its living processes: I/O processes are its children, workers theirs."""
        assert self.process is not None
        io = children(self.process.pid)
        return {"I/O process": io, "worker": [each for parent in io for each in children(parent)]}

    def resident_mib(self) -> float:
        assert self.process is not None
        found = self.descendants()
        pids = [self.process.pid, *found["I/O process"], *found["worker"]]
        return sum(resident(pid) for pid in pids) / 2**20


async def sessions_at(servers: list[Server]) -> list[int]:
    """How many sessions each server has."""
    async with httpx.AsyncClient() as http:
        infos = [(await http.get(f"{server.url}/v1/info")).json() for server in servers]
    return [info["capacity"]["sessions"] for info in infos]


async def left_at(servers: list[Server], settle_s: float) -> list[int]:
    """How many sessions each server has once none has any, or the time for that is over."""
    deadline = time.monotonic() + settle_s
    while any(left := await sessions_at(servers)) and time.monotonic() < deadline:
        await asyncio.sleep(0.5)
    return left


def children(pid: int) -> list[int]:
    try:
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except FileNotFoundError:
        return 0


def digest_of(steps: list[Any]) -> str:
    return blake2b(repr(steps).encode(), digest_size=8).hexdigest()


async def play(client: EnvClient, task: Task, pause: random.Random | None) -> tuple[str, int, bool]:
    """Play one episode: the digest of all that was seen, its steps, and whether the session stayed the same."""
    session = await client.make(task.game, KWARGS.get(task.game))
    name = session.session_id
    observation, info = await session.reset(seed=task.seed)
    seen: list[Any] = [(observation, info["success"])]
    for action in task.actions():
        if pause is not None:
            await asyncio.sleep(pause.uniform(0.0, 0.6))
        step = await session.step(action)
        seen.append((step.observation, step.reward, step.terminated, step.truncated))
        if step.terminated or step.truncated:
            break
    stayed = session.session_id == name
    await session.close()
    return digest_of(seen), len(seen) - 1, stayed


class Soak:
    """What happened.

    Args:
        gateway: The gateway.
        nodes: The nodes.
        seed: Of the order of the kills.
    """

    def __init__(self, gateway: Server, nodes: list[Server], seed: int) -> None:
        self.gateway = gateway
        self.nodes = nodes
        self.random = random.Random(seed)
        self.over = False
        self.played: dict[Task, str] = {}
        self.steps = 0
        self.lost: list[str] = []
        self.mended_by_client = 0
        self.kills = {"worker": 0, "I/O process": 0, "node": 0}
        self.memory: list[dict[str, float]] = []
        self.slowest_s = 0.0

    async def player(self, client: EnvClient, number: int) -> None:
        pause = random.Random(number)
        episode = 0
        while not self.over:
            task = Task(GAMES[(number + episode) % len(GAMES)], 1000 * number + episode)
            begun = time.monotonic()
            try:
                digest, steps, stayed = await play(client, task, pause)
            except (ProblemError, ConnectionError, TimeoutError) as error:
                self.lost.append(f"{task}: {error}")
            else:
                self.played[task] = digest
                self.steps += steps
                self.mended_by_client += not stayed
            self.slowest_s = max(self.slowest_s, time.monotonic() - begun)
            episode += 1

    async def whole(self) -> None:
        """Wait until all nodes are registered."""
        async with EnvClient(self.gateway.url) as client:
            while True:
                found = {env.env_id: env.replicas for env in await client.envs()}
                if all(found.get(game, 0) == len(self.nodes) for game in GAMES):
                    return
                await asyncio.sleep(0.2)

    async def fire(self, pause_s: float) -> None:
        kinds = ("worker", "I/O process", "node")
        while not self.over:
            await asyncio.sleep(pause_s * self.random.uniform(0.5, 1.5))
            await self.whole()
            kind = kinds[sum(self.kills.values()) % len(kinds)]
            node = self.random.choice(self.nodes)
            if kind == "node":
                node.kill()
                try:
                    await asyncio.sleep(self.random.uniform(0.0, 5.0))
                finally:
                    await asyncio.to_thread(node.start)
            else:
                victims = node.descendants()[kind]
                if not victims:
                    continue
                os.kill(self.random.choice(victims), signal.SIGKILL)
            self.kills[kind] += 1

    async def watch(self, begun: float) -> None:
        while not self.over:
            row = {
                "minute": round((time.monotonic() - begun) / 60, 2),
                "gateway_mib": round(self.gateway.resident_mib(), 1),
                "nodes_mib": round(sum(node.resident_mib() for node in self.nodes), 1),
                "episodes": len(self.played),
            }
            self.memory.append(row)
            print(row, "kills", self.kills, "lost", len(self.lost), flush=True)
            await asyncio.sleep(30)


async def undisturbed(tasks: list[Task]) -> dict[Task, str]:
    server = Server([*SERVED, "--workers", "2"]).start()
    try:
        async with EnvClient(server.url) as client:
            gate = asyncio.Semaphore(32)

            async def one(task: Task) -> str:
                async with gate:
                    return (await play(client, task, None))[0]

            return dict(zip(tasks, await asyncio.gather(*map(one, tasks)), strict=True))
    finally:
        server.kill(signal.SIGTERM)


async def run(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as place:
        linger = ("--linger-s", str(LINGER_S))
        gateway = Server(["--gateway", "--allow-network", "loopback", *linger]).start()
        nodes = [
            Server(
                [
                    *("--register", gateway.url, "--processes", "2", "--workers", "1"),
                    *("--state-dir", f"{place}/{number}", *linger, *SERVED),
                ]
            ).start()
            for number in range(3)
        ]
        begun = time.monotonic()
        soak = Soak(gateway, nodes, options.seed)
        try:
            await soak.whole()
            async with EnvClient(gateway.url) as client:
                players = [
                    asyncio.create_task(soak.player(client, number)) for number in range(options.players)
                ]
                others = [
                    asyncio.create_task(soak.fire(options.pause)),
                    asyncio.create_task(soak.watch(begun)),
                ]
                await asyncio.sleep(60 * options.minutes)
                soak.over = True
                await asyncio.gather(*players)
                for task in others:
                    task.cancel()
                await asyncio.gather(*others, return_exceptions=True)
            await soak.whole()
            left = await left_at([gateway, *nodes], SETTLE_S)
        finally:
            for server in (*nodes, gateway):
                server.kill(signal.SIGTERM)
    expected = await undisturbed(list(soak.played))
    different = [str(task) for task, digest in soak.played.items() if expected[task] != digest]
    return {
        "minutes": options.minutes,
        "players": options.players,
        "kills": soak.kills,
        "episodes": len(soak.played),
        "steps": soak.steps,
        "lost": soak.lost,
        "mended_by_client": soak.mended_by_client,
        "different": different,
        "left_at_the_gateway": left[0],
        "left_at_nodes": left[1:],
        "slowest_episode_s": round(soak.slowest_s, 1),
        "memory": soak.memory,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--players", type=int, default=48)
    parser.add_argument("--pause", type=float, default=20.0, help="Seconds between two kills, on average.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    result = asyncio.run(run(options))
    print(json.dumps({name: value for name, value in result.items() if name != "memory"}, indent=1))
    if options.out:
        commit = revision(short=True)
        about = {"command": "python " + " ".join(sys.argv), "commit": commit, "cores": os.cpu_count()}
        options.out.write_text(json.dumps({"about": about, **result}, indent=1) + "\n")
    left = result["left_at_the_gateway"] + sum(result["left_at_nodes"])
    if result["lost"] or result["different"] or result["mended_by_client"] or left:
        sys.exit(1)


if __name__ == "__main__":
    main()
