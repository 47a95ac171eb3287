"""What a journal costs a step: python benchmarks/serving/shared_journal.py [--sessions 1 64] [--rounds 3] [--out FILE].

The same sessions are played in turns through a gateway that keeps no journal, one with a journal on disk (which has
sessions of other protocols than ours, so that of a node is measured beside it), and ones that share a journal in
Redis, which writes to disk before it answers (`always`) or within a second (`everysec`). Gateways, nodes and Redis
share a core, our client has the other. CPU is that of each process.
"""

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import processes
from gateway import measure, wait_for

SERVE = [sys.executable, "-m", "env_server", "--port", "0", "--workers", "1", "--log-level", "error"]
GATEWAY = [*SERVE, "--gateway", "--allow-network", "loopback"]
LAKE = ["--no-builtin", "--env", "FrozenLake-v0=envs.frozen_lake:FrozenLakeEnv"]


@contextlib.contextmanager
def redis(place: str, sync: str) -> Iterator[tuple[str, int]]:
    """A Redis server on the servers' core; gives its URL and its process id."""
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        raise SystemExit("this needs redis-server (apt-get install redis-server)")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    directory = Path(place) / sync
    directory.mkdir()
    command = [program, "--port", str(port), "--bind", "127.0.0.1", "--dir", str(directory), "--save", ""]
    command += ["--appendonly", "yes", "--appendfsync", sync]
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        preexec_fn=lambda: os.sched_setaffinity(0, {processes.SERVER_CORE}),
    )
    try:
        while True:
            with contextlib.suppress(ConnectionError):
                socket.create_connection(("127.0.0.1", port)).close()
                break
            time.sleep(0.02)
        yield f"redis://127.0.0.1:{port}/0", process.pid
    finally:
        process.terminate()
        process.wait(30)


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
    with contextlib.ExitStack() as stack:
        place = stack.enter_context(tempfile.TemporaryDirectory())
        journals = {sync: stack.enter_context(redis(place, sync)) for sync in ("always", "everysec")}
        ways = {
            "none": [],
            "on disk": ["--state-dir", f"{place}/gateway"],
            **{f"shared, {sync}": ["--journal-url", url] for sync, (url, _) in journals.items()},
        }
        cases: dict[str, tuple[str, dict[str, int]]] = {}
        for way, arguments in ways.items():
            gateway = stack.enter_context(processes.server([*GATEWAY, *arguments]))
            url = f"http://127.0.0.1:{gateway.port}"
            node = stack.enter_context(processes.server([*SERVE, *LAKE, "--register", url]))
            asyncio.run(wait_for(url))
            pids = {"gateway": gateway.pid, "node": node.pid}
            if way.startswith("shared"):
                pids["redis"] = journals[way.partition(", ")[2]][1]
            cases[f"gateway, {way}"] = url, pids
        for way, arguments in {"none": [], "on disk": ["--state-dir", f"{place}/node"]}.items():
            node = stack.enter_context(processes.server([*SERVE, *LAKE, *arguments]))
            cases[f"node, {way}"] = f"http://127.0.0.1:{node.port}", {"node": node.pid}
        for _ in range(options.rounds):
            for count in options.sessions:
                for batch in (False, True):
                    for case, (url, pids) in cases.items():
                        label = f"{count} sessions{', batch' if batch else ''}: {case}"
                        row = asyncio.run(measure(url, pids, count, options.seconds, batch=batch))
                        rows.setdefault(label, []).append(row)
                        print(label, row, flush=True)
    table = {
        label: {name: statistics.median(row[name] for row in found) for name in found[0]}
        for label, found in rows.items()
    }
    print(
        "\n| case | steps/s | gateway CPU µs a step | node | Redis | p50 ms |\n|---|---:|---:|---:|---:|---:|"
    )
    columns = ("steps_per_s", *(f"{name}_cpu_us_per_step" for name in ("gateway", "node", "redis")), "p50_ms")
    for label, row in table.items():
        print(
            f"| {label} | "
            + " | ".join(f"{round(row[each], 2):,}" if each in row else "" for each in columns)
            + " |"
        )
    if options.out:
        about = {**processes.machine(), "load_average": processes.load_average()}
        options.out.write_text(
            json.dumps({"about": about, "medians": table, "rounds": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
