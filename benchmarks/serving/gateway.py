"""What a gateway adds to a step: python benchmarks/serving/gateway.py [--sessions 1 64] [--rounds 3] [--out FILE].

One node and one gateway before it share a core, our client has the other. The same sessions are played at the node,
through the gateway and at a bare echo of equal bytes in turns: single steps, all in flight at once, and one batch a
step. CPU is that of each process.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import processes

from clients.client import EnvClient

ENV_ID = "FrozenLake-v0"
KWARGS = {"map": ["SFF", "FHF", "FFG"], "max_episode_steps": 100}


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


async def measure(
    url: str, pids: dict[str, int], count: int, seconds: float, *, batch: bool
) -> dict[str, float]:
    async with EnvClient(url) as client:
        sessions = await client.make_many(ENV_ID, count, KWARGS)
        await asyncio.gather(*(session.reset(seed=1) for session in sessions))
        before = {name: processes.cpu_seconds(pid) for name, pid in pids.items()}
        begun = time.perf_counter()
        steps, latencies = await (
            play_batch(client, sessions, seconds) if batch else play_single(sessions, seconds)
        )
        elapsed = time.perf_counter() - begun
        used = {name: processes.cpu_seconds(pid) - before[name] for name, pid in pids.items()}
        await client.close_sessions(sessions)
    return {
        "steps_per_s": round(steps / elapsed),
        **{f"{name}_cpu_us_per_step": round(1e6 * cpu / steps, 1) for name, cpu in used.items()},
        "p50_ms": round(1e3 * statistics.median(latencies), 3),
    }


async def wait_for(url: str) -> None:
    async with EnvClient(url) as client:
        while not any(env.env_id == ENV_ID for env in await client.envs()):
            await asyncio.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sessions", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    processes.pin_load()
    serve = [sys.executable, "-m", "env_server", "--port", "0", "--workers", "1", "--log-level", "error"]
    rows: dict[str, list[dict[str, float]]] = {}
    with processes.server([*serve, "--gateway", "--allow-network", "loopback"]) as gateway:
        gateway_url = f"http://127.0.0.1:{gateway.port}"
        with (
            processes.server([*serve, "--register", gateway_url]) as node,
            processes.server([sys.executable, str(Path(__file__).with_name("echo.py"))]) as echo,
        ):
            asyncio.run(wait_for(gateway_url))
            pids = {"gateway": gateway.pid, "node": node.pid, "echo": echo.pid}
            urls = {
                "direct": f"http://127.0.0.1:{node.port}",
                "through the gateway": gateway_url,
                "echo": f"http://127.0.0.1:{echo.port}",
            }
            for _ in range(options.rounds):
                for count in options.sessions:
                    for batch in (False, True):
                        for way, url in urls.items():
                            label = f"{way}, {count} sessions" + (", batch" if batch else "")
                            row = asyncio.run(measure(url, pids, count, options.seconds, batch=batch))
                            rows.setdefault(label, []).append(row)
                            print(label, row, flush=True)
    table = {
        label: {name: statistics.median(row[name] for row in found) for name in found[0]}
        for label, found in rows.items()
    }
    print(
        "\n| case | steps/s | gateway CPU µs a step | node CPU µs a step | echo CPU µs a step | p50 ms |"
        "\n|---|---:|---:|---:|---:|---:|"
    )
    for label, row in table.items():
        print(f"| {label} | " + " | ".join(f"{value:,}" for value in row.values()) + " |")
    if options.out:
        about = {**processes.machine(), "load_average": processes.load_average()}
        options.out.write_text(
            json.dumps({"about": about, "medians": table, "rounds": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
