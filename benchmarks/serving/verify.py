"""Verdicts a second and server CPU a verdict of `roll-serve`, beside NeMo Gym's `POST /verify`.

    python benchmarks/serving/verify.py --peers ~/.cache/rollgym/peers --out benchmarks/results/verify.json

Both score the same responses with the same verifier, `Arithmetic-v0` of this repository. Ours scores in child
processes, under a wall clock for each item; all of a server's processes share one core, the load has the other. What
is called a batch is 64 items in one call; NeMo Gym's call takes one.
"""

import argparse
import re
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import processes
import rounds
import uvloop
from contenders import OWN_SERVER, peer_server
from load import Connection, HttpConnection, OwnSocketConnection, run_load
from peers import install
from rounds import Rows, progress
from verdicts import items, nemo_gym, over_http, over_socket
from wire import Dialect

from envs.verifiers.arithmetic import ArithmeticEnv

BATCH = 64
_SCORED = 20_000


class Case(NamedTuple):
    """One way of asking for verdicts.

    Attributes:
        label: How tables call it.
        kind: Its connections.
        dialect: What each of them says.
        connections: How many there are; each has one call in flight.
        server: Arguments of the interpreter that start the server.
        peer: The peer whose virtual environment it needs, if any.
    """

    label: str
    kind: type[Connection]
    dialect: Dialect
    connections: int
    server: tuple[str, ...] = OWN_SERVER
    peer: str | None = None

    def python(self, pythons: dict[str, str]) -> str:
        return sys.executable if self.peer is None else pythons[self.peer]


_NEMO = peer_server("nemo_gym_verify")
SINGLE, PEER = "rollgym, HTTP, single", "NeMo Gym, single"
HTTP_BATCH, SOCKET_BATCH = "rollgym, HTTP, batch of 64", "rollgym, socket, batch of 64"
CASES = (
    *(Case(SINGLE, HttpConnection, over_http(1), count) for count in (1, 16, 64)),
    *(Case(PEER, HttpConnection, nemo_gym, count, _NEMO, "nemo-gym") for count in (1, 16, 64)),
    *(Case("rollgym, socket, single", OwnSocketConnection, over_socket(1), count) for count in (1, 16, 64)),
    *(Case(HTTP_BATCH, HttpConnection, over_http(BATCH), count) for count in (1, 4)),
    *(Case(SOCKET_BATCH, OwnSocketConnection, over_socket(BATCH), count) for count in (1, 4)),
)


def measure_all(chosen: Sequence[Case], options: argparse.Namespace, pythons: dict[str, str]) -> Rows:
    """Every case once a round; each round has servers of its own."""
    rows: Rows = defaultdict(list)
    for number in range(options.rounds):
        with ExitStack() as stack:
            servers = {
                each.server: stack.enter_context(processes.server((each.python(pythons), *each.server)))
                for each in {each.server: each for each in chosen}.values()
            }
            for each in chosen:
                server = servers[each.server]
                groups = [[each.dialect(index)] for index in range(each.connections)]
                load = run_load(server.port, server.pid, each.kind, groups, seconds=options.seconds)
                found = uvloop.run(load).summary() | {"load_average": processes.load_average()}
                rows[each.label, each.connections].append(found)
                progress(f"round {number + 1}: {each.label}, {each.connections}: {found}")
    return rows


def scoring_cost(rounds_wanted: int) -> float:
    """CPU µs that the verifier itself takes for an item, in this process."""
    verifier = ArithmeticEnv()
    tasks = items(BATCH, 0)
    costs = []
    for _ in range(rounds_wanted):
        begun = time.process_time()
        for number in range(_SCORED):
            task = tasks[number % BATCH]
            verifier.score(task["response"], task)
        costs.append(1e6 * (time.process_time() - begun) / _SCORED)
    return rounds.median(costs)


def find_bars(rows: Rows) -> list[dict[str, Any]]:
    """What the figures should be: against the peer's single calls with as many connections, and with its best."""
    name = "steps_per_s"

    def pace(label: str, connections: int, reference: int) -> float | None:
        return rounds.ratio(rows, name, (label, connections), (PEER, reference))

    return [
        *(
            rounds.bar(
                f"verdicts/s, {SINGLE}, {count} connections, times {PEER}",
                pace(SINGLE, count, count),
                least=8,
            )
            for count in (1, 16, 64)
        ),
        *(
            rounds.bar(
                f"verdicts/s, {label}, {count} connections, times {PEER}, 1 connection",
                pace(label, count, 1),
                least=100,
            )
            for label in (HTTP_BATCH, SOCKET_BATCH)
            for count in (1, 4)
        ),
    ]


def markdown(result: dict[str, Any]) -> str:
    """The tables."""
    lines = [
        (
            each["who"],
            each["sessions"],
            f"{each['steps_per_s']:,.0f}",
            f"{each['server_cpu_us_per_step']:,.1f}",
            f"{each['p50_ms']:,.2f}",
            f"{each['p99_ms']:,.2f}",
        )
        for each in result["verdicts"]
    ]
    heads = (
        "server",
        "connections",
        "verdicts/s",
        "server CPU µs a verdict",
        "p50 ms a call",
        "p99 ms a call",
    )
    parts = (
        rounds.about(result, result["verdicts"]),
        rounds.table(heads, lines),
        f"The verifier itself takes {result['scoring_cpu_us']:.1f} µs of CPU for an item.",
        rounds.bars_table(result["bars"]),
    )
    return "\n\n".join(parts)


def main() -> None:
    parser = rounds.parser(__doc__, rounds=3, seconds=2.0)
    parser.add_argument("--peers", type=Path, help="folder of the peers' virtual environments")
    parser.add_argument("--python", action="append", default=[], help="an interpreter to try for peers")
    options = parser.parse_args()
    pythons: dict[str, str] = {}
    if options.peers is not None:
        install.install(options.peers, options.python)
        pythons = install.interpreters(options.peers)
    chosen = [
        each
        for each in CASES
        if (each.peer is None or each.peer in pythons) and re.search(options.only, each.label)
    ]
    paths = {str(options.peers): "PEERS", **dict.fromkeys(options.python, "PYTHON")}
    result = rounds.record("benchmarks/serving/verify.py", options, pythons, paths)
    processes.pin_load()
    scoring = scoring_cost(options.rounds)
    rows = measure_all(chosen, options, pythons)
    result |= {"scoring_cpu_us": scoring, "verdicts": rounds.medians(rows), "bars": find_bars(rows)}
    rounds.write(result, options.out)
    print(markdown(result))


if __name__ == "__main__":
    main()
