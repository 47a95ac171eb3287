"""Verdicts a second and server CPU a verdict of `roll-serve`, beside NeMo Gym's `POST /verify`.

    python benchmarks/serving/verify.py --peers ~/.cache/rollgym/peers --out benchmarks/results/verify.json

Both score the same responses with the same verifier, `Arithmetic-v0` of this repository. Ours scores in child
processes, under a wall clock for each item; all of a server's processes share one core, the load has the other. What
is called a batch is 64 items in one call; NeMo Gym's call takes one.
"""

import time
from typing import Any

import cases
import processes
import rounds
from contenders import OWN_SERVER, Contender, peer_server
from load import HttpConnection, OwnSocketConnection
from rounds import Rows
from verdicts import items, nemo_gym, over_http, over_socket

from rollgym.envs.verifiers.arithmetic import ArithmeticEnv

BATCH = 64
_SCORED = 20_000
_CONNECTIONS, _BATCHING = (1, 16, 64), (1, 4)

_NEMO = peer_server("nemo_gym_verify")
SINGLE, PEER = "rollgym, HTTP, single", "NeMo Gym, single"
HTTP_BATCH, SOCKET_BATCH = "rollgym, HTTP, batch of 64", "rollgym, socket, batch of 64"
CASES = (
    Contender(SINGLE, OWN_SERVER, HttpConnection, over_http(1), sizes=_CONNECTIONS),
    Contender(PEER, _NEMO, HttpConnection, nemo_gym, "nemo-gym", sizes=_CONNECTIONS),
    Contender("rollgym, socket, single", OWN_SERVER, OwnSocketConnection, over_socket(1), sizes=_CONNECTIONS),
    Contender(HTTP_BATCH, OWN_SERVER, HttpConnection, over_http(BATCH), sizes=_BATCHING),
    Contender(SOCKET_BATCH, OWN_SERVER, OwnSocketConnection, over_socket(BATCH), sizes=_BATCHING),
)


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
            for count in _CONNECTIONS
        ),
        *(
            rounds.bar(
                f"verdicts/s, {label}, {count} connections, times {PEER}, 1 connection",
                pace(label, count, 1),
                least=100,
            )
            for label in (HTTP_BATCH, SOCKET_BATCH)
            for count in _BATCHING
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
    options = cases.parser(__doc__).parse_args()
    pythons = cases.interpreters(options)
    chosen = cases.choose(CASES, options, pythons)
    result = rounds.record("benchmarks/serving/verify.py", options, pythons, cases.placeholders(options))
    processes.pin_load()
    scoring = scoring_cost(options.rounds)
    rows = cases.measure(chosen, options, pythons)
    result |= {"scoring_cpu_us": scoring, "verdicts": rounds.medians(rows), "bars": find_bars(rows)}
    rounds.write(result, options.out)
    print(markdown(result))


if __name__ == "__main__":
    main()
