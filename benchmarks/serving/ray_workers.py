"""What a Ray actor adds to a step: python benchmarks/serving/ray_workers.py [--sessions 1 64] [--out FILE].

Two servers run the same environment in one child process each: one has the child itself, the other has it in an actor
of a Ray cluster that it starts on this machine. The same sessions are played in turns: single steps, all in flight at
once, and one batch a step. CPU is that of the I/O process, of the actor, of the child, and of what else Ray runs.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import processes
from gateway import ENV_ID, KWARGS, play_batch, play_single

from clients.client import EnvClient

_SERVE = (
    *(sys.executable, "-m", "env_server", "--port", "0", "--log-level", "error"),
    *("--isolation", f"{ENV_ID}=process", "--workers"),
)
SERVERS = {
    "process workers": (*_SERVE, "1"),
    "Ray workers": (*_SERVE, "ray", "--ray-max-actors", "1"),
}
PARTS = ("io", "actor", "child", "other")


def part_of(pid: int, server: int) -> str:
    """Which part of a server a process is."""
    if pid == server:
        return "io"
    command = Path(f"/proc/{pid}/cmdline").read_bytes()
    if command.startswith(b"ray::Host"):
        return "actor"
    return "child" if b"env_server.workers.child" in command else "other"


def cpu_by_part(server: int) -> Counter[str]:
    found: Counter[str] = Counter()
    for pid in processes.tree(server):
        found[part_of(pid, server)] += processes.cpu_seconds_alone(pid)
    return found


def mebibytes_by_part(server: int) -> dict[str, float]:
    """Memory that each part has to itself (shared pages are counted in their proportion)."""
    found: Counter[str] = Counter()
    for pid in processes.tree(server):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                found[part_of(pid, server)] += int(line.split()[1])
    return {part: round(found[part] / 1024, 1) for part in PARTS if found[part]}


async def measure(server: processes.Server, count: int, seconds: float, *, batch: bool) -> dict[str, float]:
    async with EnvClient(f"http://127.0.0.1:{server.port}") as client:
        sessions = await client.make_many(ENV_ID, count, KWARGS)
        await asyncio.gather(*(session.reset(seed=1) for session in sessions))
        before = cpu_by_part(server.pid)
        begun = time.perf_counter()
        steps, latencies = await (
            play_batch(client, sessions, seconds) if batch else play_single(sessions, seconds)
        )
        elapsed = time.perf_counter() - begun
        used = cpu_by_part(server.pid)
        await client.close_sessions(sessions)
    return {
        "steps_per_s": round(steps / elapsed),
        **{f"{part}_cpu_us_per_step": round(1e6 * (used[part] - before[part]) / steps, 1) for part in PARTS},
        "p50_ms": round(1e3 * statistics.median(latencies), 3),
    }


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
    rows: dict[str, list[dict[str, float]]] = {}
    memory: dict[str, Any] = {}
    load_before = processes.load_average()
    with (
        processes.server(SERVERS["process workers"]) as plain,
        processes.server(SERVERS["Ray workers"]) as with_ray,
    ):
        servers = {"process workers": plain, "Ray workers": with_ray}
        for _ in range(options.rounds):
            for count in options.sessions:
                for batch in (False, True) if count > 1 else (False,):
                    for name, server in servers.items():
                        label = f"{name}, {count} sessions" + (", batch" if batch else "")
                        row = asyncio.run(measure(server, count, options.seconds, batch=batch))
                        rows.setdefault(label, []).append(row)
                        print(label, row, flush=True)
        memory = {name: mebibytes_by_part(server.pid) for name, server in servers.items()}
    table: dict[str, dict[str, Any]] = {
        label: {name: statistics.median(row[name] for row in found) for name in found[0]}
        for label, found in rows.items()
    }
    print("\n| case | steps/s | I/O µs a step | actor µs | child µs | rest of Ray µs | p50 ms |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for label, row in table.items():
        print(f"| {label} | " + " | ".join(f"{value:,}" for value in row.values()) + " |")
    print("\nMiB:", json.dumps(memory))
    if options.out:
        about = {
            **processes.machine(),
            "command": " ".join(["python", *sys.argv]),
            "load_average_before": load_before,
            "load_average": processes.load_average(),
        }
        options.out.write_text(
            json.dumps({"about": about, "medians": table, "mebibytes": memory, "rounds": rows}, indent=1)
            + "\n"
        )


if __name__ == "__main__":
    main()
