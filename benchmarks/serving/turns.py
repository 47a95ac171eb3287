"""Single steps and batches through our client, servers in turn: what benchmarks of gateways and workers share."""

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import processes

from rollgym.clients.client.client import EnvClient

ENV_ID = "FrozenLake-v0"
KWARGS = {"map": ["SFF", "FHF", "FFG"], "max_episode_steps": 100}

Row = dict[str, float]
"""What one measurement gave, by name."""


class Case(NamedTuple):
    """A server that has its turn.

    Attributes:
        url: Where it is.
        cpu_seconds: Gives the CPU seconds that each part of it has used.
    """

    url: str
    cpu_seconds: Callable[[], Mapping[str, float]]


def of_processes(url: str, pids: Mapping[str, int]) -> Case:
    """A server whose parts are processes."""
    return Case(url, lambda: {name: processes.cpu_seconds(pid) for name, pid in pids.items()})


async def play_single(sessions: list[Any], seconds: float) -> tuple[int, list[float]]:
    """Step every session as soon as it is answered."""
    end = time.perf_counter() + seconds
    latencies: list[float] = []

    async def play(session: Any) -> None:
        while time.perf_counter() < end:
            begun = time.perf_counter()
            await session.step("Left", autoreset=True)
            latencies.append(time.perf_counter() - begun)

    await asyncio.gather(*(play(session) for session in sessions))
    return len(latencies), latencies


async def play_batch(client: EnvClient, sessions: list[Any], seconds: float) -> tuple[int, list[float]]:
    """Step all sessions in one frame."""
    end = time.perf_counter() + seconds
    latencies: list[float] = []
    while time.perf_counter() < end:
        begun = time.perf_counter()
        await client.step_many([(session, "Left", True) for session in sessions])
        latencies.append(time.perf_counter() - begun)
    return len(latencies) * len(sessions), latencies


async def measure(case: Case, count: int, seconds: float, *, batch: bool) -> Row:
    """Steps, their time, and the CPU of each part."""
    async with EnvClient(case.url) as client:
        sessions = await client.make_many(ENV_ID, count, KWARGS)
        await asyncio.gather(*(session.reset(seed=1) for session in sessions))
        before, begun = case.cpu_seconds(), time.perf_counter()
        steps, latencies = await (
            play_batch(client, sessions, seconds) if batch else play_single(sessions, seconds)
        )
        elapsed, after = time.perf_counter() - begun, case.cpu_seconds()
        await client.close_sessions(sessions)
    used = {name: after[name] - before.get(name, 0.0) for name in after}
    return {
        "steps_per_s": round(steps / elapsed),
        **{f"{name}_cpu_us_per_step": round(1e6 * cpu / steps, 1) for name, cpu in used.items()},
        "p50_ms": round(1e3 * statistics.median(latencies), 3),
    }


async def wait_for(url: str) -> None:
    """Wait until the environment has been registered."""
    async with EnvClient(url) as client:
        while not any(env.env_id == ENV_ID for env in await client.envs()):
            await asyncio.sleep(0.1)


def read_options(description: str | None) -> argparse.Namespace:
    """The arguments that these benchmarks have; from here on, this process has the load's core."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sessions", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    processes.pin_load()
    return options


def take_turns(options: argparse.Namespace, cases: Mapping[str, Case]) -> dict[str, list[Row]]:
    """Measure every case in every round, with single steps and in batches; one row a round."""
    rows: dict[str, list[Row]] = {}
    for _ in range(options.rounds):
        for count in options.sessions:
            for batch in (False, True):
                for name, case in cases.items():
                    label = f"{name}, {count} sessions" + (", batch" if batch else "")
                    row = asyncio.run(measure(case, count, options.seconds, batch=batch))
                    rows.setdefault(label, []).append(row)
                    print(label, row, flush=True)
    return rows


def report(
    options: argparse.Namespace, rows: Mapping[str, list[Row]], columns: Mapping[str, str], **more: Any
) -> None:
    """Show the medians, and write them to the file that was asked for.

    Args:
        options: What `read_options` has read.
        rows: What `take_turns` has given.
        columns: What the table shows, by its headings.
        more: What else belongs into the file.
    """
    medians = {
        label: {name: statistics.median(row[name] for row in found) for name in found[0]}
        for label, found in rows.items()
    }
    print(f"\n| case | {' | '.join(columns)} |\n|---|{'---:|' * len(columns)}")
    for label, row in medians.items():
        shown = (f"{round(row[name], 2):,}" if name in row else "" for name in columns.values())
        print(f"| {label} | {' | '.join(shown)} |")
    if options.out:
        about = {
            **processes.machine(),
            "command": " ".join(["python", *sys.argv]),
            "load_average": processes.load_average(),
        }
        result = {"about": about, "medians": medians, **more, "rounds": rows}
        options.out.write_text(json.dumps(result, indent=1) + "\n")
