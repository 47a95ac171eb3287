"""Gymnasium's FrozenLake-v1, 64 at a time: behind `roll-serve` in one frame, and in Gymnasium's vector environments.

    python benchmarks/serving/vector.py --out benchmarks/results/vector.json

Every way takes the same random actions, so episodes end and begin anew within the steps. The server, and whatever
steps environments in one process, has one core, the load or the client the other; `AsyncVectorEnv` has all.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import processes
import rounds
import uvloop
from load import OwnSocketConnection, run_load
from rounds import Rows, progress
from vector_local import actions
from wire import Dialect, bare_gymnasium_batch, gymnasium_batch

_HERE = Path(__file__).parent
ENV_ID, COUNT = "FrozenLake-v1", 64
_OWN = ("-m", "rollgym.env_server", "--port", "0", "--gymnasium", ENV_ID, "--log-level", "warning")
_INLINE = (*_OWN, "--isolation", f"{ENV_ID}=inline")
_BARE = (str(_HERE / "bare.py"), "--gymnasium", ENV_ID)
_BARE_ONLY = (str(_HERE / "bare.py"), "--env", "none")
_ANY_CORE = set(range(os.cpu_count() or 1)) & os.sched_getaffinity(0)


class Case(NamedTuple):
    """One way of stepping.

    Attributes:
        label: How tables call it.
        way: The way of `vector_local.py`, or None for the load generator.
        server: Arguments of the interpreter that start the server, if there is one.
        dialect: What the load generator says.
        batches: Frames in flight.
        cores: Where the process of `way` runs.
    """

    label: str
    way: str | None = None
    server: tuple[str, ...] | None = None
    dialect: Dialect | None = None
    batches: int = 1
    cores: frozenset[int] = frozenset({processes.LOAD_CORE})


_SERVER_CORE = frozenset({processes.SERVER_CORE})
_ROWS = actions(COUNT).tolist()
_ASK, _ASK_BARE = gymnasium_batch(ENV_ID, COUNT, _ROWS), bare_gymnasium_batch(COUNT, _ROWS)
ENVIRONMENT, SEEDED = "environments, nothing around", "environments, a seed for each episode"
SYNC, ASYNC = "SyncVectorEnv", "AsyncVectorEnv"
ONE, TWO = "rollgym inline, load generator", "rollgym inline, load generator, 2 frames in flight"
CASES = (
    Case(ENVIRONMENT, "environment", cores=_SERVER_CORE),
    Case(SEEDED, "seeded", cores=_SERVER_CORE),
    Case(SYNC, "sync", cores=_SERVER_CORE),
    Case(ASYNC, "async", cores=frozenset(_ANY_CORE)),
    Case("bare Starlette, no environment", server=_BARE_ONLY, dialect=_ASK_BARE),
    Case("bare Starlette", server=_BARE, dialect=_ASK_BARE),
    Case(ONE, server=_INLINE, dialect=_ASK),
    Case(TWO, server=_INLINE, dialect=_ASK, batches=2),
    Case("rollgym inline, RemoteVectorEnv", "remote", _INLINE),
    Case("rollgym process, load generator", server=_OWN, dialect=_ASK),
    Case("rollgym process, RemoteVectorEnv", "remote", _OWN),
)


def measure_all(chosen: list[Case], options: argparse.Namespace) -> Rows:
    """Every case once a round; each round has servers of its own."""
    rows: Rows = defaultdict(list)
    for number in range(options.rounds):
        with ExitStack() as stack:
            servers = {
                arguments: stack.enter_context(processes.server((sys.executable, *arguments)))
                for arguments in dict.fromkeys(each.server for each in chosen)
                if arguments is not None
            }
            for each in chosen:
                server = None if each.server is None else servers[each.server]
                found = measure(each, server, options.seconds) | {"load_average": processes.load_average()}
                rows[each.label, COUNT].append(found)
                progress(f"round {number + 1}: {each.label}: {found}")
    return rows


def measure(case: Case, server: processes.Server | None, seconds: float) -> dict[str, float]:
    """One case; without a server the process that steps is what the CPU is counted of."""
    if case.way is not None:
        return _measure_child(case, case.way, server, seconds)
    assert server is not None
    assert case.dialect is not None
    groups = [[case.dialect(index) for index in range(case.batches)]]
    found = uvloop.run(run_load(server.port, server.pid, OwnSocketConnection, groups, seconds=seconds))
    summary = found.summary()
    return {name: summary[name] for name in ("steps_per_s", "server_cpu_us_per_step", "load_cpu_us_per_step")}


def _measure_child(case: Case, way: str, server: processes.Server | None, seconds: float) -> dict[str, float]:
    command = [sys.executable, str(_HERE / "vector_local.py"), way, "--env-id", ENV_ID]
    command += ["--count", str(COUNT), "--seconds", str(seconds)]
    if server is not None:
        command += ["--url", f"http://127.0.0.1:{server.port}", "--pid", str(server.pid)]
    pinned: Callable[[], None] = lambda: os.sched_setaffinity(0, case.cores)  # noqa: E731 - for preexec_fn
    output = subprocess.check_output(command, env=processes.environment(), preexec_fn=pinned)
    found: dict[str, float] = json.loads(output)
    return found if server is not None else {**found, "load_cpu_us_per_step": 0.0}


def own_cost(rows: Rows, label: str) -> float | None:
    """What a step costs beyond the environment's own, whose episodes are seeded as the server's are."""
    if (label, COUNT) not in rows or (SEEDED, COUNT) not in rows:
        return None
    name = "server_cpu_us_per_step"
    pairs = zip(rows[label, COUNT], rows[SEEDED, COUNT], strict=True)
    return rounds.median(one[name] - other[name] for one, other in pairs)


def find_bars(rows: Rows) -> list[dict[str, Any]]:
    """What the figures should be."""

    def pace(label: str, reference: str) -> float | None:
        return rounds.ratio(rows, "steps_per_s", (label, COUNT), (reference, COUNT))

    return [
        rounds.bar(f"steps/s of {ONE}, times {SYNC}", pace(ONE, SYNC), least=1),
        rounds.bar(f"steps/s of {TWO}, times {SYNC}", pace(TWO, SYNC), least=1),
        rounds.bar(f"steps/s of {ONE}, times {ASYNC}", pace(ONE, ASYNC), least=6),
        rounds.bar(f"server CPU µs a step of {ONE}, beyond the environments'", own_cost(rows, ONE), most=6),
        rounds.bar(f"server CPU µs a step of {TWO}, beyond the environments'", own_cost(rows, TWO), most=6),
    ]


def markdown(result: dict[str, Any]) -> str:
    """The tables."""
    lines = [
        (
            each["who"],
            f"{each['steps_per_s']:,.0f}",
            f"{each['server_cpu_us_per_step']:.1f}",
            f"{each['load_cpu_us_per_step']:.1f}" if each["load_cpu_us_per_step"] else "–",
        )
        for each in result["steps"]
    ]
    heads = ("64 of FrozenLake-v1", "steps/s", "server CPU µs a step", "load or client CPU µs a step")
    parts = (
        rounds.about(result, result["steps"]),
        rounds.table(heads, lines),
        rounds.bars_table(result["bars"]),
    )
    return "\n\n".join(parts)


def main() -> None:
    options = rounds.parser(__doc__, rounds=5, seconds=2.0).parse_args()
    chosen = [each for each in CASES if re.search(options.only, each.label)]
    result = rounds.record("benchmarks/serving/vector.py", options, {}, {})
    processes.pin_load()
    rows = measure_all(chosen, options)
    result |= {"steps": rounds.medians(rows), "bars": find_bars(rows)}
    rounds.write(result, options.out)
    print(markdown(result))


if __name__ == "__main__":
    main()
