"""How much of a machine sessions take: memory, threads, and latency when steps come at times of their own.

    python benchmarks/serving/capacity.py --out benchmarks/results/capacity.json

Memory is resident memory of the server and its children after many sessions were opened and have taken a step, less
that before. As many are opened before them: to open thousands at the same moment takes memory for each that waits for
its turn, which later ones find free. What the first ones took is stated beside it. What the same environments take by
themselves is measured in a process of its own. Arrivals are paced at half of the rate that the same sessions reached
just before when each always had a step in flight.
"""

import argparse
import json
import re
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import processes
import rounds
import uvloop
from contenders import OWN_SERVER
from load import OwnSocketConnection, close, hold_sessions, run_load
from paced import run_paced
from rounds import Rows, progress
from wire import Dialect, Session, bare_walk, rollgym, rollgym_long, rollgym_walk

_HERE = Path(__file__).parent
_LAKE = "rollgym.envs.games.frozen_lake:FrozenLakeEnv"
_LONG = "benchmarks.serving.long_replies:LongRepliesEnv"
_SERVER = (*OWN_SERVER, "--env", f"LongReplies={_LONG}", "--isolation", "LongReplies=inline")
_WARM_SESSIONS = 50
_SETTLE_S = 1.0
_LOAD = 0.5
_SEED = 20_240_601


class Held(NamedTuple):
    """Sessions that are opened, take some steps and then rest.

    Attributes:
        label: How tables call them.
        sessions: How many.
        sockets: How many sockets share them.
        dialect: What each of them says.
        entry_point: The environment, to measure what it takes by itself.
        kwargs: What it is made with.
        steps: How many steps each takes.
    """

    label: str
    sessions: int
    sockets: int
    dialect: Dialect
    entry_point: str = _LAKE
    kwargs: dict[str, Any] = {}  # noqa: RUF012 - a field, which nobody changes
    steps: int = 1

    def groups(self, sessions: int) -> Sequence[Sequence[Session]]:
        """Fresh conversations, one list for each socket; the index is the place in the list."""
        sockets = min(self.sockets, sessions)
        return [[self.dialect(index) for index in range(sessions // sockets)] for _ in range(sockets)]


def _long(length: int, steps: int) -> Held:
    label = f"texts of {length:,} characters, {steps} step" + ("s" if steps > 1 else "")
    return Held(label, 4096, 4, rollgym_long(length, steps), _LONG, {"length": length}, steps)


SHARED, OWN = "FrozenLake-v0, 4 sockets", "FrozenLake-v0, a socket each"
HELD = (
    Held(SHARED, 4096, 4, rollgym),
    Held(OWN, 2000, 2000, rollgym),
    _long(4096, 1),
    _long(4096, 30),
    _long(500, 1),
    _long(500, 30),
)


class Paced(NamedTuple):
    """Steps that come at times of their own.

    Attributes:
        sockets: How many sockets share the sessions.
        dialect: What each session says.
        server: Arguments of the interpreter that start the server.
    """

    sockets: int
    dialect: Dialect = rollgym_walk
    server: tuple[str, ...] = _SERVER


REFERENCE = "a socket each, bare Starlette"
PACED = {
    "one socket": Paced(1),
    "a socket each": Paced(256),
    REFERENCE: Paced(256, bare_walk, (str(_HERE / "bare.py"),)),
}
_PACED_SESSIONS = 256


def measure_held(chosen: Sequence[Held], options: argparse.Namespace) -> Rows:
    """A fresh server for every measurement."""
    rows: Rows = defaultdict(list)
    for number in range(options.rounds):
        for each in chosen:
            alone = environment_kib(each)
            with processes.server((sys.executable, *_SERVER)) as server:
                found = uvloop.run(hold(each, server))
            found["environment_kib"] = alone
            found["beyond_kib"] = round(found["kib_per_session"] - alone, 2)
            found["load_average"] = processes.load_average()
            rows[each.label, each.sessions].append(found)
            progress(f"round {number + 1}: {each.label}: {found}")
    return rows


async def hold(held: Held, server: processes.Server) -> dict[str, float]:
    """What sessions take that rest."""
    port, pid = server
    warm = await hold_sessions(port, OwnSocketConnection, held.groups(_WARM_SESSIONS))
    time.sleep(_SETTLE_S)
    threads, resident = processes.threads(pid), [processes.resident_kib(pid)]
    opened = []
    for _ in range(2):
        opened += await hold_sessions(port, OwnSocketConnection, held.groups(held.sessions))
        time.sleep(_SETTLE_S)
        resident.append(processes.resident_kib(pid))
    before, first, second = resident
    more = processes.threads(pid) - threads
    close([*warm, *opened])
    return {
        "sockets": held.sockets,
        "kib_per_session": round((second - first) / held.sessions, 2),
        "kib_per_session_at_first": round((first - before) / held.sessions, 2),
        "server_mib_before": round(before / 1024, 1),
        "threads_before": threads,
        "threads_more": more,
    }


def environment_kib(held: Held) -> float:
    """What the environments of these sessions take by themselves, each."""
    command = [sys.executable, str(_HERE / "environment_size.py"), held.entry_point]
    command += [
        "--kwargs",
        json.dumps(held.kwargs),
        "--count",
        str(held.sessions),
        "--steps",
        str(held.steps),
    ]
    return float(json.loads(subprocess.check_output(command, env=processes.environment())))


def measure_paced(chosen: Sequence[str], options: argparse.Namespace) -> Rows:
    """The peak rate, and then arrivals at half of it, on one server."""
    rows: Rows = defaultdict(list)
    for number in range(options.rounds):
        for label in chosen:
            with processes.server((sys.executable, *PACED[label].server)) as server:
                found = uvloop.run(pace(server, PACED[label], options, _SEED + number))
            found["load_average"] = processes.load_average()
            rows[label, _PACED_SESSIONS].append(found)
            progress(f"round {number + 1}: paced, {label}: {found}")
    return rows


async def pace(
    server: processes.Server, paced: Paced, options: argparse.Namespace, seed: int
) -> dict[str, float]:
    """One measurement."""
    port, pid = server
    peak = (
        await run_load(port, pid, OwnSocketConnection, _walkers(paced), seconds=options.seconds)
    ).summary()
    found = await run_paced(
        port,
        pid,
        _walkers(paced),
        rate=_LOAD * peak["steps_per_s"],
        seconds=options.paced_seconds,
        seed=seed,
    )
    return {"peak_steps_per_s": peak["steps_per_s"], "peak_p50_ms": peak["p50_ms"], **found}


def _walkers(paced: Paced) -> Sequence[Sequence[Session]]:
    share = _PACED_SESSIONS // paced.sockets
    return [[paced.dialect(index) for index in range(share)] for _ in range(paced.sockets)]


def find_bars(held: Sequence[dict[str, Any]], paced: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the figures should be."""
    by_label = {each["who"]: each for each in held}
    shared, own = by_label.get(SHARED, {}), by_label.get(OWN, {})
    threads = max((each["threads_more"] for each in held), default=None)
    return [
        rounds.bar(
            "KiB a session beyond the environment, 4,096 on 4 sockets", shared.get("beyond_kib"), most=10
        ),
        *(
            rounds.bar(f"KiB a session beyond the environment, {each['who']}", each["beyond_kib"], most=10)
            for each in held
            if each["who"] not in (SHARED, OWN)
        ),
        rounds.bar("KiB a socket with a session, 2,000", own.get("kib_per_session"), most=40),
        rounds.bar("threads more with all sessions open", threads, most=0),
        *(
            figure
            for each in paced
            if each["who"] != REFERENCE
            for figure in (
                # Where the server does not keep up, every step waits and the ratio says nothing.
                rounds.bar(
                    f"share of the arrivals' rate that was reached, {each['who']}", each["share"], least=0.97
                ),
                rounds.bar(f"p99 over p50 at half load, {each['who']}", each["p99_over_p50"], most=5),
            )
        ),
    ]


def markdown(result: dict[str, Any]) -> str:
    """The tables."""
    held = [
        (
            each["who"],
            f"{each['sessions']:,}",
            f"{each['kib_per_session']:.1f}",
            f"{each['kib_per_session_at_first']:.1f}",
            f"{each['environment_kib']:.1f}",
            f"{each['beyond_kib']:.1f}",
            f"{each['threads_before']:.0f} + {each['threads_more']:.0f}",
            f"{each['server_mib_before']:.0f}",
        )
        for each in result["held"]
    ]
    paced = [
        (
            each["who"],
            each["sessions"],
            f"{each['peak_steps_per_s']:,.0f}",
            f"{each['steps_per_s']:,.0f}",
            f"{each['server_cpu_us_per_step']:.1f}",
            *(f"{each[name]:.2f}" for name in ("p50_ms", "p99_ms", "p999_ms", "p99_over_p50")),
            f"{each['generator_late_p99_ms']:.2f}",
        )
        for each in result["paced"]
    ]
    held_heads = (
        *("idle sessions", "how many", "KiB each", "of the first", "of it the environment", "beyond it"),
        *("threads", "server before, MiB"),
    )
    paced_heads = (
        *("paced", "sessions", "peak steps/s", "paced steps/s", "server CPU µs a step"),
        *("p50 ms", "p99 ms", "p99.9 ms", "p99 over p50", "load late, p99 ms"),
    )
    parts = [rounds.about(result, [*result["held"], *result["paced"]])]
    parts += [rounds.table(held_heads, held)] if held else []
    parts += [rounds.table(paced_heads, paced)] if paced else []
    return "\n\n".join((*parts, rounds.bars_table(result["bars"])))


def main() -> None:
    parser = rounds.parser(__doc__, rounds=3, seconds=3.0)
    parser.add_argument("--paced-seconds", type=float, default=10.0, help="length of the paced arrivals")
    options = parser.parse_args()
    chosen = [each for each in HELD if re.search(options.only, each.label)]
    paced_labels = [label for label in PACED if re.search(options.only, f"paced, {label}")]
    processes.allow_many_files()
    result = rounds.record("benchmarks/serving/capacity.py", options, {}, {})
    processes.pin_load()
    held = rounds.medians(measure_held(chosen, options))
    paced = rounds.medians(measure_paced(paced_labels, options))
    result |= {"paced_seconds": options.paced_seconds, "held": held, "paced": paced}
    result["bars"] = find_bars(held, paced)
    rounds.write(result, options.out)
    print(markdown(result))


if __name__ == "__main__":
    main()
