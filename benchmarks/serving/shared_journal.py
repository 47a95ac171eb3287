"""What a journal costs a step: python benchmarks/serving/shared_journal.py [--sessions 1 64] [--rounds 3] [--out FILE].

The same sessions are played in turns through a gateway that keeps no journal, one with a journal on disk (which has
sessions of other protocols than ours, so that of a node is measured beside it), and ones that share a journal in
Redis, which writes to disk before it answers (`always`) or within a second (`everysec`), alone or with a replica that
confirms each write (`--journal-replicas 1`). Gateways, nodes and Redis share a core, our client has the other. CPU is
that of each process.
"""

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import processes
from gateway import GATEWAY, SERVE
from turns import Case, of_processes, read_options, report, take_turns, wait_for

COLUMNS = {
    "steps/s": "steps_per_s",
    "gateway CPU µs a step": "gateway_cpu_us_per_step",
    "node": "node_cpu_us_per_step",
    "Redis": "redis_cpu_us_per_step",
    "p50 ms": "p50_ms",
}
LAKE = ["--no-builtin", "--env", "FrozenLake-v0=rollgym.envs.games.frozen_lake:FrozenLakeEnv"]


@contextlib.contextmanager
def redis(place: str, name: str, sync: str, *more: str) -> Iterator[tuple[str, int, int]]:
    """A Redis server on the servers' core; gives its URL, its port and its process id."""
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        raise SystemExit("this needs redis-server (apt-get install redis-server)")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    directory = Path(place) / name
    directory.mkdir()
    command = [program, "--port", str(port), "--bind", "127.0.0.1", "--dir", str(directory), "--save", ""]
    command += ["--appendonly", "yes", "--appendfsync", sync, *more]
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
        yield f"redis://127.0.0.1:{port}/0", port, process.pid
    finally:
        process.terminate()
        process.wait(30)


def main() -> None:
    options = read_options(__doc__)
    with contextlib.ExitStack() as stack:
        place = stack.enter_context(tempfile.TemporaryDirectory())
        journals = {
            name: stack.enter_context(redis(place, name, name.split()[0]))
            for name in ("always", "everysec", "everysec with a replica")
        }
        followed = journals["everysec with a replica"][1]
        stack.enter_context(redis(place, "replica", "everysec", "--replicaof", "127.0.0.1", str(followed)))
        ways = {"none": [], "on disk": ["--state-dir", f"{place}/gateway"]}
        for name, (url, _, _) in journals.items():
            confirmed = ["--journal-replicas", "1"] if name.endswith("replica") else []
            ways[f"shared, {name}"] = ["--journal-url", url, *confirmed]
        cases: dict[str, Case] = {}
        for way, arguments in ways.items():
            gateway = stack.enter_context(processes.server([*GATEWAY, *arguments]))
            url = f"http://127.0.0.1:{gateway.port}"
            node = stack.enter_context(processes.server([*SERVE, *LAKE, "--register", url]))
            asyncio.run(wait_for(url))
            pids = {"gateway": gateway.pid, "node": node.pid}
            if way.startswith("shared"):
                pids["redis"] = journals[way.partition(", ")[2]][2]
            cases[f"gateway, {way}"] = of_processes(url, pids)
        for way, arguments in {"none": [], "on disk": ["--state-dir", f"{place}/node"]}.items():
            node = stack.enter_context(processes.server([*SERVE, *LAKE, *arguments]))
            cases[f"node, {way}"] = of_processes(f"http://127.0.0.1:{node.port}", {"node": node.pid})
        rows = take_turns(options, cases)
    report(options, rows, COLUMNS)


if __name__ == "__main__":
    main()
