"""The figures of a benchmark in two checkouts that take turns: is what changed within the machine's noise?

    git worktree add ../before COMMIT
    python benchmarks/two_checkouts.py --before ../before --out benchmarks/results/two_checkouts.json -- \
        benchmarks/serving/gateway.py --sessions 64 --rounds 1 --out
    python benchmarks/two_checkouts.py --before ../before --out benchmarks/results/two_checkouts.json -- \
        benchmarks/sandbox/throughput.py --runs 10 --output
    python benchmarks/two_checkouts.py --before ../before --out benchmarks/results/two_checkouts.json -- \
        benchmarks/serving/verify.py --only rollgym --rounds 1 --seconds 1 --out

What stands behind `--` is a benchmark with its arguments, the last of which is the option that names its JSON file.
Each checkout runs its own benchmark on its own modules. A benchmark's table is kept in the file under its name.
"""

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rollgym.clients.measuring.revision import revision

ROOT = Path(__file__).resolve().parents[1]
_NAMES = ("who", "what", "sessions")
"""What rows of our benchmarks are named by."""
_ABOUT = ("spread", "load_average", "load_average_at_start", "load_average_at_end", "bars", "rounds", "about")


def figures(content: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], float]]:
    """Every number of a benchmark's result, with where it stands."""
    if isinstance(content, dict):
        named = tuple(str(content[name]) for name in _NAMES if name in content)
        for key, value in content.items():
            if key not in (*_NAMES, *_ABOUT):
                yield from figures(value, (*path, *named, key))
    elif isinstance(content, list):
        for each in content:
            yield from figures(each, path)
    elif isinstance(content, int | float) and not isinstance(content, bool):
        yield path, content


def run(checkout: Path, command: list[str]) -> dict[tuple[str, ...], float]:
    """Run a checkout's benchmark, and return its figures."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "result.json")
        subprocess.run(
            [sys.executable, *command, str(file)],
            cwd=checkout,
            # Before what is installed, which is one of the two.
            env=os.environ | {"PYTHONPATH": str(checkout)},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        return dict(figures(json.loads(file.read_text())))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", type=Path, required=True, help="a checkout of the commit before")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--figures", default="cpu|median", help="regular expression of the figures to keep")
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the result")
    parser.add_argument("command", nargs="+", help="the benchmark, behind --")
    options = parser.parse_args()
    checkouts = {"before": options.before.resolve(), "after": ROOT}
    found: dict[tuple[str, ...], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    order = random.Random(1)
    for number in range(options.rounds):
        for name in order.sample(sorted(checkouts), len(checkouts)):
            for place, value in run(checkouts[name], options.command).items():
                if re.search(options.figures, place[-1]):
                    found[place][name].append(value)
        print(f"round {number + 1} of {options.rounds}", file=sys.stderr)

    commits = {name: revision(checkout) for name, checkout in checkouts.items()}
    rows = []
    print("| figure | before, median (least to most) | after |\n| --- | ---: | ---: |")
    for place, values in found.items():
        if len(values) < len(checkouts):
            continue
        row = {name: [min(each), statistics.median(each), max(each)] for name, each in values.items()}
        rows.append({"figure": " ".join(place)} | row)
        shown = [f"{row[name][1]:.4g} ({row[name][0]:.4g} to {row[name][2]:.4g})" for name in checkouts]
        print(f"| {' '.join(place)} | {' | '.join(shown)} |")
    tables = json.loads(options.out.read_text()) if options.out.exists() else {}
    tables[options.command[0]] = {
        "command": " ".join(["python benchmarks/two_checkouts.py --before BEFORE --", *options.command]),
        "commits": commits,
        "rounds": options.rounds,
        "load_average_at_end": round(os.getloadavg()[0], 2),
        "rows": rows,
    }
    options.out.write_text(json.dumps(tables, indent=1) + "\n")


if __name__ == "__main__":
    main()
