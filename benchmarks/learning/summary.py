"""What runs reached, in one table: python benchmarks/learning/summary.py RUN [RUN ...] [--output FILE]."""

import argparse
import json
from pathlib import Path

from rollgym.clients.measuring.revision import revision
from rollgym.clients.measuring.statistics import Interval, rate_difference, success_rate
from rollgym.trainer.core.run_files import read_lines


def scores(rows, evaluation_set, mode):
    """First and last measurement of an evaluation set, as intervals."""
    key = f"evaluate/{evaluation_set}/{mode}"
    measured = [row for row in rows if f"{key}/success" in row]
    return (
        [
            success_rate(round(row[f"{key}/success"] * row[f"{key}/episodes"]), round(row[f"{key}/episodes"]))
            for row in (measured[0], measured[-1])
        ]
        if measured
        else None
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--output", type=Path, help="write the table here as JSON, too")
    parser.add_argument("--command", default="", help="what made the runs; stands in the file")
    parser.add_argument("--commit", help="of the code that made the runs; absent: this one")
    options = parser.parse_args()
    table = []
    for run in options.runs:
        rows = read_lines(run / "metrics.jsonl")
        steps = max(row["step"] for row in rows)
        evaluation_sets = sorted(
            {key.split("/")[1] for row in rows for key in row if key.startswith("evaluate/")}
        )
        for evaluation_set in evaluation_sets:
            for mode in ("random", "blind", "sampled", "greedy"):
                pair = scores(rows, evaluation_set, mode)
                if pair is None:
                    continue
                before, after = pair
                gain = rate_difference(before, after) if mode in ("sampled", "greedy") else Interval(0, 0, 0)
                table.append((run.name, evaluation_set, mode, steps, before, after, gain))
    print("| run | evaluation set | mode | steps | start | end | gain |\n|---|---|---|---:|---|---|---|")
    for run, evaluation_set, mode, steps, before, after, gain in table:
        shown = str(gain) if mode in ("sampled", "greedy") else ""
        print(f"| {run} | {evaluation_set} | {mode} | {steps} | {before} | {after} | {shown} |")
    if options.output:
        head = revision()
        content = [
            {
                "run": run,
                "panel": evaluation_set,  # the key of the tables that were written before
                "mode": mode,
                "steps": steps,
                "start": vars_of(before),
                "end": vars_of(after),
                "gain": vars_of(gain),
            }
            for run, evaluation_set, mode, steps, before, after, gain in table
        ]
        options.output.write_text(
            json.dumps(
                {
                    "command": options.command,
                    "commit": options.commit or head,
                    "rows": content,
                },
                indent=1,
            )
            + "\n"
        )


def vars_of(interval):
    return {"value": interval.value, "low": interval.low, "high": interval.high}


if __name__ == "__main__":
    main()
