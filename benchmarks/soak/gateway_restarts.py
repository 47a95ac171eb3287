"""Episodes while their gateway is killed: python benchmarks/soak/gateway_restarts.py [--pause 9] [--no-journal].

Two nodes with all built-in environments register with a gateway, which is killed (SIGKILL) and started again: once in
the middle, or with `--pause` again and again. Every episode makes a session, plays it and closes it, as a run does.
What an episode ends in other than its end is counted, and so are the sessions that are left at the nodes after all were
closed; afterwards all are played on a server that nobody disturbs, and compared by the digest of all that was seen.
"""

import argparse
import asyncio
import collections
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.soak.run import LINGER_S, SETTLE_S, Server, Task, digest_of, left_at  # noqa: E402
from rollgym.clients.client.client import EnvClient  # noqa: E402
from rollgym.clients.measuring.revision import revision  # noqa: E402
from rollgym.clients.protocol.errors import ProblemError  # noqa: E402

# Of the whole catalog, so that what a node registers last is played as often as what it registers first.
GAMES = (
    *(
        "FrozenLake-v0",
        "Sokoban-v0",
        "Bandit-v0",
        "GuessNumber-v0",
        "TowerOfHanoi-v0",
        "Game2048-v0",
        "Sudoku-v0",
    ),
    *("Mastermind-v0", "Minesweeper-v0", "Blackjack-v0", "Maze-v0", "WebShop-v0", "ToolUse-v0", "Retail-v0"),
)
STEPS = 12
SLOWEST_S = 120.0


class Failures:
    """What episodes ended in other than their end."""

    def __init__(self) -> None:
        self.played: dict[Task, str] = {}
        self.failed: collections.Counter[str] = collections.Counter()
        self.slowest_s = 0.0


async def play(client: EnvClient, task: Task, pause: random.Random | None) -> str:
    session = await client.make(task.game)
    try:
        observation, _ = await session.reset(seed=task.seed)
        seen: list[Any] = [observation]
        for action in task.actions()[:STEPS]:
            if pause is not None:
                await asyncio.sleep(pause.uniform(0.0, 0.4))
            step = await session.step(action)
            seen.append((step.observation, step.reward, step.terminated, step.truncated))
            if step.terminated or step.truncated:
                break
    finally:
        await session.close()
    return digest_of(seen)


async def player(url: str, tasks: Iterator[Task], result: Failures, number: int) -> None:
    """Play until no task is left, each episode over a client of its own, as short-lived callers have."""
    pause = random.Random(number)
    for task in tasks:
        begun = time.monotonic()
        try:
            async with EnvClient(url, timeout_s=SLOWEST_S) as client:
                result.played[task] = await play(client, task, pause)
        except ProblemError as problem:
            result.failed[problem.code] += 1
        except (ConnectionError, TimeoutError) as error:
            result.failed[type(error).__name__] += 1
        result.slowest_s = max(result.slowest_s, time.monotonic() - begun)


async def kill(gateway: Server, options: argparse.Namespace, counts: dict[str, Any]) -> None:
    """Kill and start the gateway; note how long its catalog lacked something after each start."""
    counts.update(kills=0, whole_after_s=[])
    whole = await catalog_of(gateway)
    while True:
        await asyncio.sleep(options.pause or options.first)
        await asyncio.to_thread(gateway.kill)
        await asyncio.to_thread(gateway.start)
        counts["kills"] += 1
        started = time.monotonic()
        while await catalog_of(gateway) != whole:
            await asyncio.sleep(0.05)
            if options.pause and time.monotonic() - started > options.pause:
                break
        counts["whole_after_s"].append(round(time.monotonic() - started, 2))
        if not options.pause:
            return


async def catalog_of(server: Server) -> dict[str, int]:
    async with EnvClient(server.url) as client:
        return {env.env_id: env.replicas for env in await client.envs()}


async def settled(gateway: Server) -> None:
    """Wait until both nodes have registered all that they have."""
    async with asyncio.timeout(120):
        while True:
            catalog = await catalog_of(gateway)
            if len(catalog) > 20 and set(catalog.values()) == {2}:
                return
            await asyncio.sleep(0.2)


async def undisturbed(tasks: list[Task]) -> dict[Task, str]:
    server = Server(["--workers", "1"]).start()
    try:
        async with EnvClient(server.url) as client:
            return {task: await play(client, task, None) for task in tasks}
    finally:
        server.kill()


async def run(options: argparse.Namespace) -> dict[str, Any]:
    tasks = [Task(GAMES[number % len(GAMES)], number) for number in range(options.episodes)]
    result = Failures()
    counts: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        journal = () if options.no_journal else ("--state-dir", place)
        gateway = Server(["--gateway", "--allow-network", "loopback", *journal]).start()
        node = ["--register", gateway.url, "--workers", "1", "--linger-s", str(LINGER_S)]
        nodes = [Server(node).start() for _ in range(2)]
        try:
            await settled(gateway)
            killing = asyncio.create_task(kill(gateway, options, counts))
            waiting = iter(tasks)
            begun = time.monotonic()
            await asyncio.gather(
                *(player(gateway.url, waiting, result, number) for number in range(options.players))
            )
            seconds = time.monotonic() - begun
            killing.cancel()
            await asyncio.gather(killing, return_exceptions=True)
            left = await left_at(nodes, SETTLE_S)
        finally:
            for server in (gateway, *nodes):
                server.kill()
    expected = await undisturbed(list(result.played))
    different = sum(expected[task] != digest for task, digest in result.played.items())
    return {
        "episodes": options.episodes,
        "failed": sum(result.failed.values()),
        "failures": dict(result.failed),
        "different": different,
        "left_at_nodes": left,
        "seconds": round(seconds, 1),
        "slowest_episode_s": round(result.slowest_s, 1),
        **counts,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--players", type=int, default=40)
    parser.add_argument("--pause", type=float, help="Kill again and again, so many seconds apart.")
    parser.add_argument("--first", type=float, default=3.0, help="When the only kill comes, in seconds.")
    parser.add_argument("--no-journal", action="store_true", help="The gateway has no `state_dir`.")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    result = asyncio.run(run(options))
    print(json.dumps(result, indent=1))
    if options.out:
        commit = revision(short=True)
        about = {"command": "python " + " ".join(sys.argv), "commit": commit, "cores": os.cpu_count()}
        options.out.write_text(json.dumps({"about": about, **result}, indent=1) + "\n")
    if result["failed"] or result["different"] or sum(result["left_at_nodes"]):
        sys.exit(1)


if __name__ == "__main__":
    main()
