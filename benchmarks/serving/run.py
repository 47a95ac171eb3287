"""Steps a second and server CPU a step of `roll-serve`, beside a bare Starlette that steps the same environments.

    python benchmarks/serving/run.py [--env FrozenLake-v0] [--rounds 3] [--out benchmarks/results/serving.json]

Cases take turns (ours, bare, ours, ...), and medians over the rounds are printed: on a machine that does other work
as well, CPU a step is the number to compare.
"""

import argparse
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import uvloop

sys.path.insert(0, str(Path(__file__).parent))
import load

ACTION = "<answer>Left</answer>"


@contextmanager
def server(*command: str) -> Iterator[tuple[int, int]]:
    """Run a server; gives its port and process id."""
    process = subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: os.sched_setaffinity(0, {0}),
    )
    try:
        assert process.stdout is not None
        found = None
        while found is None:
            line = process.stdout.readline()
            assert line, "the server did not start"
            found = re.search(r"serving on http://[^:]+:(\d+)", line)
        yield int(found.group(1)), process.pid
    finally:
        process.terminate()
        process.wait(30)


async def make(port: int, env_id: str, count: int) -> list[str]:
    answers = await load.ask(
        port, [{"id": 1, "op": "make", "env_id": env_id, "count": count, "reset": {"seed": 1}}]
    )
    return [session["session_id"] for session in answers[0]["ok"]["sessions"]]


def step(session_id: str, number: int) -> bytes:
    return orjson.dumps(
        {"id": number, "op": "step", "session_id": session_id, "action": ACTION, "autoreset": True}
    )


def batch(session_ids: list[str]) -> bytes:
    ops = [{"op": "step", "session_id": each, "action": ACTION, "autoreset": True} for each in session_ids]
    return orjson.dumps({"id": 1, "op": "batch", "ops": ops})


async def case(
    ours: tuple[int, int], bare: tuple[int, int], name: str, env_id: str, seconds: float
) -> dict[str, Any]:
    kind, _, size = name.partition("-")
    count = int(size)
    session_ids = await make(ours[0], env_id, count)
    frames = [step(each, 1) for each in session_ids] if kind == "single" else [batch(session_ids)]
    result = {}
    for label, (port, pid) in (("rollgym", ours), ("bare", bare)):
        measured = await load.closed_loop(
            port, frames, pid, steps_per_frame=1 if kind == "single" else count, seconds=seconds
        )
        result[label] = measured.summary()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--env", default="FrozenLake-v0")
    parser.add_argument(
        "--serve", default="", help="further arguments of roll-serve, as one text: --serve='--env m:C'"
    )
    parser.add_argument("--cases", nargs="*", default=["single-1", "single-64", "batch-64"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    os.sched_setaffinity(0, {os.cpu_count() - 1 if os.cpu_count() else 0})
    rounds: dict[str, list[dict[str, Any]]] = {}
    with (
        server("-m", "env_server", "--port", "0", *shlex.split(options.serve)) as ours,
        server(str(Path(__file__).parent / "bare.py"), "--env", options.env) as bare,
    ):
        for _ in range(options.rounds):
            for name in options.cases:
                found = uvloop.run(case(ours, bare, name, options.env, options.seconds))
                rounds.setdefault(name, []).append(found)
    table = {
        name: {
            label: {
                metric: statistics.median(each[label][metric] for each in found) for metric in found[0][label]
            }
            for label in found[0]
        }
        for name, found in rounds.items()
    }
    text = json.dumps({"env": options.env, "rounds": options.rounds, "medians": table}, indent=1)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
