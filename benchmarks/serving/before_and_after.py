"""CPU a step of two checkouts' servers, for a change that is to cost nothing.

    git worktree add ../before COMMIT
    python benchmarks/serving/before_and_after.py --before ../before --out benchmarks/results/before_and_after.json

Both servers run at the same time on one core, and one load generator plays with each in turn, in random order, many
times for a moment: what else the machine does falls on both alike. The smallest figure is what the code costs, the
median what it costs here and now.
"""

import random
import sys
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path

import processes
import rounds
import uvloop
from contenders import CONTENDERS, OWN_SERVER
from load import run_load
from rounds import Rows, medians, progress

from rollgym.clients.measuring.revision import revision

_TURNS = 3
_NAMES = ("before", "after")


def measure(before: Path, only: str, sessions: int, count: int, seconds: float) -> Rows:
    """Every way of asking our server, of both checkouts in turn."""
    chosen = [each for each in CONTENDERS if each.server == OWN_SERVER and only in each.label]
    rows: Rows = defaultdict(list)
    order = random.Random(1)
    for number in range(count):
        with ExitStack() as stack:
            command = (sys.executable, *OWN_SERVER)
            servers = {
                name: stack.enter_context(processes.server(command, root))
                for name, root in zip(_NAMES, (before, processes.ROOT), strict=True)
            }
            for each in chosen * _TURNS:
                if sessions not in each.sizes:
                    continue
                for name in order.sample(_NAMES, len(_NAMES)):
                    groups = each.groups(sessions)
                    port, pid = servers[name]
                    found = uvloop.run(run_load(port, pid, each.kind, groups, seconds=seconds)).summary()
                    rows[f"{each.label}, {name}", sessions].append(
                        found | {"load_average": processes.load_average()}
                    )
        progress(f"round {number + 1} of {count}")
    return rows


def main() -> None:
    parser = rounds.parser(__doc__, rounds=5, seconds=0.5)
    parser.add_argument("--before", type=Path, required=True, help="a checkout of the commit before")
    parser.add_argument("--sessions", type=int, default=64)
    options = parser.parse_args()
    before = options.before.resolve()
    processes.allow_many_files()
    processes.pin_load()
    result = {
        **rounds.record(
            "benchmarks/serving/before_and_after.py", options, {}, {str(options.before): "BEFORE"}
        ),
        "before": revision(before),
        "steps": medians(measure(before, options.only, options.sessions, options.rounds, options.seconds)),
    }
    rounds.write(result, options.out)
    print(rounds.about(result, result["steps"]), end="\n\n")
    table = [
        (
            each["who"],
            each["sessions"],
            f"{each['server_cpu_us_per_step']:.1f}",
            f"{each['spread']['server_cpu_us_per_step'][0]:.1f}",
        )
        for each in result["steps"]
    ]
    print(rounds.table(("server", "sessions", "CPU µs a step, median", "smallest"), table))


if __name__ == "__main__":
    main()
