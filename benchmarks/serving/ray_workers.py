"""What a Ray actor adds to a step: python benchmarks/serving/ray_workers.py [--sessions 1 64] [--out FILE].

Two servers run the same environment in one child process each: one has the child itself, the other has it in an actor
of a Ray cluster that it starts on this machine. The same sessions are played in turns: single steps, all in flight at
once, and one batch a step. CPU is that of the I/O process, of the actor, of the child, and of what else Ray runs.
"""

import functools
import json
import sys
from collections import Counter
from pathlib import Path

import processes
from turns import ENV_ID, Case, read_options, report, take_turns

_SERVE = (
    *(sys.executable, "-m", "rollgym.env_server", "--port", "0", "--log-level", "error"),
    *("--isolation", f"{ENV_ID}=process", "--workers"),
)
SERVERS = {
    "process workers": (*_SERVE, "1"),
    "Ray workers": (*_SERVE, "ray", "--ray-max-actors", "1"),
}
PARTS = ("io", "actor", "child", "other")
COLUMNS = {
    "steps/s": "steps_per_s",
    "I/O µs a step": "io_cpu_us_per_step",
    "actor µs": "actor_cpu_us_per_step",
    "child µs": "child_cpu_us_per_step",
    "rest of Ray µs": "other_cpu_us_per_step",
    "p50 ms": "p50_ms",
}


def part_of(pid: int, server: int) -> str:
    """Which part of a server a process is."""
    if pid == server:
        return "io"
    command = Path(f"/proc/{pid}/cmdline").read_bytes()
    if command.startswith(b"ray::ActorHost"):
        return "actor"
    return "child" if b"rollgym.env_server.workers.child" in command else "other"


def cpu_by_part(server: int) -> dict[str, float]:
    found: dict[str, float] = dict.fromkeys(PARTS, 0.0)
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


def main() -> None:
    options = read_options(__doc__)
    load_before = processes.load_average()
    with (
        processes.server(SERVERS["process workers"]) as plain,
        processes.server(SERVERS["Ray workers"]) as with_ray,
    ):
        servers = {"process workers": plain, "Ray workers": with_ray}
        cases = {
            name: Case(f"http://127.0.0.1:{server.port}", functools.partial(cpu_by_part, server.pid))
            for name, server in servers.items()
        }
        rows = take_turns(options, cases)
        memory = {name: mebibytes_by_part(server.pid) for name, server in servers.items()}
    report(options, rows, COLUMNS, mebibytes=memory, load_before=load_before)
    print("\nMiB:", json.dumps(memory))


if __name__ == "__main__":
    main()
