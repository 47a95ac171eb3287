"""Steps a second, server CPU a step, latency and memory of `roll-serve`, its peers and a bare Starlette.

    python benchmarks/serving/run.py --peers ~/.cache/rollgym/peers --out benchmarks/results/serving.json

All servers step the same environment class, and one load generator speaks to all of them in their own formats. Cases
take turns, and medians over the rounds are printed. On a machine that does other work as well, CPU a step is the
figure to compare. Without `--peers` only this repository's servers are measured; with it, peers that are missing in
the folder are installed there first.
"""

import argparse
import time
from collections import defaultdict
from typing import Any

import cases
import orjson
import processes
import rounds
import uvloop
from clients_compared import CLIENT_CASES, measure_client
from contenders import CONTENDERS, Contender
from load import close, hold_sessions, run_load
from report import markdown
from rounds import Rows, medians, progress
from wire import ACTION, Session

from rollgym.envs.games.frozen_lake import FrozenLakeEnv

_WARM_SESSIONS = 50
_CHECKED_SEED = 1


def check_game(contender: Contender, server: processes.Server) -> None:
    """Check a contender that plays."""
    if contender.plays:
        uvloop.run(check(contender, server))


async def check(contender: Contender, server: processes.Server) -> None:
    """Make sure that a contender does the work: the boards that it sends are those of the environment here.

    Raises:
        RuntimeError: They are not.
    """
    game = FrozenLakeEnv()
    game.reset(seed=_CHECKED_SEED)
    wanted = orjson.dumps(game.step(ACTION)[0])[1:-1]
    answers: list[bytes] = []

    def watched(session: Session) -> Session:
        request = next(session)
        while True:
            answers.append((yield request))
            request = session.send(answers[-1])

    session = watched(contender.dialect(_CHECKED_SEED))
    await run_load(server.port, server.pid, contender.kind, [[session]], warm_up_s=0, seconds=0.05)
    if not any(wanted in answer and b"available_actions" in answer for answer in answers[:4]):
        raise RuntimeError(f"{contender.label} does not play the same game: {answers[:4]}")


async def measure_memory(contender: Contender, server: processes.Server, sessions: int) -> dict[str, float]:
    """Memory that open sessions take which have made one step and now rest."""
    port, pid = server
    warm = await hold_sessions(port, contender.kind, contender.groups(_WARM_SESSIONS))
    time.sleep(0.5)
    before = processes.resident_kib(pid)
    held = await hold_sessions(port, contender.kind, contender.groups(sessions))
    time.sleep(0.5)
    after = processes.resident_kib(pid)
    close([*warm, *held])
    return {"kib_per_session": round((after - before) / sessions, 1), "server_mib": round(before / 1024, 1)}


def measure_all_memory(chosen: list[Contender], options: argparse.Namespace, pythons: dict[str, str]) -> Rows:
    """A fresh server for every measurement."""
    rows: Rows = defaultdict(list)
    for _ in range(options.rounds):
        for each in chosen:
            if each.idle and options.idle:
                with processes.server((each.python(pythons), *each.server)) as server:
                    found = uvloop.run(measure_memory(each, server, options.idle))
                rows[each.label, options.idle].append(found)
                progress(f"{each.label}, {options.idle} idle: {found}")
    return rows


def measure_clients(options: argparse.Namespace, pythons: dict[str, str]) -> Rows:
    """Each side's own client against its own server."""
    rows: Rows = defaultdict(list)
    for _ in range(options.rounds):
        for case in CLIENT_CASES:
            if case.peer is None or case.peer in pythons:
                found = measure_client(case, pythons, options.seconds)
                rows[case.label, case.sessions].append(found)
                progress(f"{case.label}, {case.sessions}: {found}")
    return rows


def main() -> None:
    parser = cases.parser(__doc__)
    parser.add_argument("--sessions", type=int, nargs="*", default=[1, 64, 256])
    parser.add_argument("--idle", type=int, default=1000, help="idle sessions for memory; 0 leaves it out")
    parser.add_argument("--no-clients", action="store_true", help="leave the comparison of clients out")
    options = parser.parse_args()

    pythons = cases.interpreters(options)
    chosen = cases.choose(CONTENDERS, options, pythons)
    processes.allow_many_files()
    processes.pin_load()
    result: dict[str, Any] = {
        **rounds.record("benchmarks/serving/run.py", options, pythons, cases.placeholders(options)),
        "steps": medians(cases.measure(chosen, options, pythons, sizes=options.sessions, first=check_game)),
        "idle": medians(measure_all_memory(chosen, options, pythons)),
        "clients": [] if options.no_clients else medians(measure_clients(options, pythons)),
    }
    rounds.write(result, options.out)
    print(markdown(result))


if __name__ == "__main__":
    main()
