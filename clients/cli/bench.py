"""`roll-env bench`: steps a second, latency and CPU time of a served environment."""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from typing import Any, NamedTuple

import orjson
from rich.console import Console
from rich.table import Table

from rollgym.clients.cli.arguments import (
    CONNECT_TIMEOUT_S,
    PATIENCE_S,
    UsageError,
    add_kwargs_argument,
    add_server_arguments,
    parse_kwargs,
    read_number,
    read_seed,
    server_url,
)
from rollgym.clients.client.client import EnvClient
from rollgym.clients.client.session import EnvSession
from rollgym.clients.measuring.metrics import sum_of_metric
from rollgym.clients.protocol.errors import ProblemError

_SAMPLES = 64


class BenchResult(NamedTuple):
    """One measurement of a served environment."""

    sessions: int
    batch: bool
    encoding: str
    seconds: float
    steps: int
    steps_per_second: float
    latency_p50_ms: float
    latency_p99_ms: float
    client_cpu_us_per_step: float
    server_cpu_us_per_step: float | None


def add_parser(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("bench", help="measure a served environment")
    parser.add_argument("env_id", help="Which environment.")
    add_server_arguments(parser)
    add_kwargs_argument(parser)
    parser.add_argument(
        "--sessions", type=int, action="append", help="How many at once (repeatable; default 64)."
    )
    parser.add_argument("--batch", action="store_true", help="All sessions in one frame a step, in lockstep.")
    parser.add_argument(
        "--seconds", type=read_number, default=5.0, help="How long to measure each (default 5)."
    )
    parser.add_argument("--encoding", choices=("json", "msgpack"), default="json", help="Of the frames.")
    parser.add_argument("--seed", type=read_seed, default=0, help="Of actions and episodes.")
    parser.add_argument("--json", action="store_true", help="Print the numbers as JSON.")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure, and print a table."""
    sizes = options.sessions or [64]
    if min(sizes) < 1 or options.seconds <= 0:
        raise UsageError("--sessions and --seconds must be positive")
    with server_url(options) as url:
        results = [asyncio.run(_measure(url, options, size)) for size in sizes]
    if options.json:
        print(orjson.dumps([each._asdict() for each in results], option=orjson.OPT_INDENT_2).decode())
        return 0
    table = Table(title=f"{options.env_id}: random actions", box=None, pad_edge=False)
    for heading in (
        *("sessions", "frames", "encoding", "steps/s", "p50 ms", "p99 ms"),
        *("client CPU us/step", "server CPU us/step"),
    ):
        table.add_column(heading, justify="right")
    for each in results:
        cpu = each.server_cpu_us_per_step
        table.add_row(
            str(each.sessions),
            "batch" if each.batch else "single",
            each.encoding,
            f"{each.steps_per_second:,.0f}",
            f"{each.latency_p50_ms:.2f}",
            f"{each.latency_p99_ms:.2f}",
            f"{each.client_cpu_us_per_step:.1f}",
            "-" if cpu is None else f"{cpu:.1f}",
        )
    Console().print(table)
    return 0


async def _measure(url: str, options: argparse.Namespace, count: int) -> BenchResult:
    async with EnvClient(
        url,
        token=options.token,
        encoding=options.encoding,
        connect_timeout_s=CONNECT_TIMEOUT_S,
        timeout_s=PATIENCE_S,
    ) as client:
        sessions = await client.make_many(options.env_id, count, parse_kwargs(options.kwarg))
        players = [
            RandomPlayer(session, (options.seed * 2**20 + index) % 2**53)
            for index, session in enumerate(sessions)
        ]
        await asyncio.gather(*(player.begin() for player in players))
        server_before = await asyncio.to_thread(server_cpu_seconds, url, options.token)
        begun, cpu_before = time.perf_counter(), time.process_time()
        end = begun + options.seconds
        if options.batch:
            latencies = await _play_in_lockstep(client, players, end)
            steps = len(latencies) * count
        else:
            parts = await asyncio.gather(*(player.play(end) for player in players))
            latencies = [latency for part in parts for latency in part]
            steps = len(latencies)
        seconds, client_cpu = time.perf_counter() - begun, time.process_time() - cpu_before
        server_after = await asyncio.to_thread(server_cpu_seconds, url, options.token)
    if not latencies:
        raise UsageError(f"no step was made in {options.seconds:g} s: measure longer with --seconds")
    latencies.sort()
    server_cpu = None if server_before is None or server_after is None else server_after - server_before
    return BenchResult(
        sessions=count,
        batch=options.batch,
        encoding=options.encoding,
        seconds=round(seconds, 3),
        steps=steps,
        steps_per_second=round(steps / seconds, 1),
        latency_p50_ms=round(latencies[len(latencies) // 2] * 1e3, 3),
        latency_p99_ms=round(latencies[int(len(latencies) * 0.99)] * 1e3, 3),
        client_cpu_us_per_step=round(client_cpu / steps * 1e6, 2),
        server_cpu_us_per_step=None if server_cpu is None else round(server_cpu / steps * 1e6, 2),
    )


class RandomPlayer:
    """Plays random actions in one session.

    Args:
        session: The session.
        seed: The seed of its actions and episodes.
    """

    def __init__(self, session: EnvSession, seed: int) -> None:
        self.session = session
        self._random = random.Random(seed)
        self._actions: list[Any] | None = None
        session.action_space.seed(seed)
        # Drawn beforehand, to measure the client and not the sampling of actions.
        self._samples = [session.action_space.sample() for _ in range(_SAMPLES)]

    async def begin(self) -> None:
        """Begin an episode with a random seed."""
        _, info = await self.session.reset(self._random.randrange(2**32))
        self.note(info)

    def note(self, info: dict[str, Any]) -> None:
        """Store the actions that are available now."""
        actions = info.get("available_actions")
        self._actions = actions if isinstance(actions, list) else None

    def choose(self) -> Any:
        """Return a random action that is available now."""
        if self._actions:
            return self._random.choice(self._actions)
        return self._random.choice(self._samples)

    async def play(self, end: float) -> list[float]:
        """Step until the end, on the performance counter; return how long each step took."""
        latencies = []
        while (begun := time.perf_counter()) < end:
            _, _, terminated, truncated, info = await self.session.step(self.choose())
            latencies.append(time.perf_counter() - begun)
            self.note(info)
            if terminated or truncated:
                await self.begin()
        return latencies


async def _play_in_lockstep(client: EnvClient, players: list[RandomPlayer], end: float) -> list[float]:
    """Step all sessions together until the end; return how long each frame took."""
    latencies = []
    while (begun := time.perf_counter()) < end:
        results = await client.step_many([(player.session, player.choose(), True) for player in players])
        latencies.append(time.perf_counter() - begun)
        for player, result in zip(players, results, strict=True):
            if isinstance(result, ProblemError):
                raise result
            player.note(result.info)
    return latencies


def server_cpu_seconds(url: str, token: str | None) -> float | None:
    """Return the CPU time that the server's processes have used, or None if its metrics do not report it."""
    return sum_of_metric(url, token, "process_cpu_seconds_total")
