"""Sixteen presets on FrozenLake within one budget: python benchmarks/learning/presets.py [--seeds 0 1 2].

Every run has the settings of benchmarks/learning/presets.yaml and what `PRESETS` says of its preset. All presets have
their first seed before any has its second. Finished runs are skipped and killed ones go on, so the script can be
started again until it is done. The table of all runs that are finished is printed and written to
benchmarks/results/presets.json (`--table`: nothing but that); what that has of runs made elsewhere stays in it.
"""

import argparse
import json
import resource
import subprocess
import sys
from pathlib import Path

from summary import scores, vars_of

from rollgym.clients.measuring.revision import revision
from rollgym.clients.measuring.statistics import Interval, rate_difference
from rollgym.trainer.core.run_files import read_lines

ROOT = Path(__file__).parents[2]
CONFIG = "benchmarks/learning/presets.yaml"
RESULT = ROOT / "benchmarks" / "results" / "presets.json"
NEAR_THE_START = "kl: {coefficient: 0.05, estimator: k3, placement: loss}"
BY_EPISODE = f"advantage: {{turn_discount: 0.95}}, {NEAR_THE_START}"
ALONE = ("rollout.groups_per_step=128", "rollout.group_size=1")
IN_QUARTERS = ("rollout.groups_per_step=8", "steps=160", "optimizer.warmup_steps=16", "checkpoint.every=40")
# What a run lays over the paper's values: discounts, and lengths and bounds for rows of two tokens and twenty turns.
PRESETS: dict[str, tuple[str, ...]] = {
    "grpo": (BY_EPISODE,),
    "dr_grpo": (f"{BY_EPISODE}, aggregation: {{horizon: 40}}",),
    # Once nearly all groups are equal, ten rounds of others (verl's bound) would be most of the run's time.
    "dapo": (
        f"{BY_EPISODE}, filter: {{max_rounds: 4}}, reward: {{overlong: {{max_tokens: 40, buffer_tokens: 8}}}}",
    ),
    "gspo": (f"{BY_EPISODE}, surrogate: {{clip_low: 0.03, clip_high: 0.04}}",),
    "gmpo": (BY_EPISODE,),
    "cispo": (BY_EPISODE,),
    "sapo": (BY_EPISODE,),
    "topr": (BY_EPISODE,),
    # The form of TRL's trainer, and ReMax with as many updates as the others: a quarter of the batch, four times.
    "rloo": (
        "advantage: {turn_discount: 0.95}, surrogate: {kind: ppo}, ratio: {level: sequence_sum}, "
        "aggregation: {mode: seq-mean-token-mean}",
    ),
    "remax": (f"{BY_EPISODE}, minibatches: 1", *IN_QUARTERS),
    "reinforce_pp": ("advantage: {gamma: 0.97}", *ALONE),
    "reinforce_pp_baseline": (BY_EPISODE,),
    "agentic_reinforce": (NEAR_THE_START, *ALONE),
    "gigpo": (NEAR_THE_START,),
    "ppo": (f"advantage: {{gamma: 0.97, gae_lambda: 0.95}}, {NEAR_THE_START}", *ALONE),
    "starpo_s": (
        f"advantage: {{gamma: 0.97, gae_lambda: 0.95}}, filter: {{fraction: 0.5}}, {NEAR_THE_START}",
    ),
}


def overrides(preset: str) -> list[str]:
    """Return the words of the command line that make a run one of this preset."""
    algorithm, *others = PRESETS[preset]
    updates = "" if "minibatches" in algorithm else "minibatches: 4, "
    return [f"algorithm={{preset: {preset}, {updates}proximal: behaviour, {algorithm}}}", *others]


def train(preset: str, seed: int, run: Path) -> None:
    """Make a run, or go on with it, and note its processor time and commit beside it."""
    command = [sys.executable, "-m", "rollgym.trainer.cli", "--config", CONFIG, *overrides(preset)]
    command += [f"seed={seed}", f"output_dir={run}", f"name={run.name}", "checkpoint.resume=auto"]
    commit = revision()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    try:
        subprocess.run(command, check=True, cwd=ROOT)
    finally:
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        attempt = {"commit": commit, "cpu_s": round(spent, 1)}
        with run.with_suffix(".attempts.jsonl").open("a") as file:
            file.write(json.dumps(attempt) + "\n")


def entry(preset: str, seed: int, run: Path) -> dict[str, object]:
    """Return what a finished run reached."""
    rows = read_lines(run / "metrics.jsonl")
    attempts = read_lines(run.with_suffix(".attempts.jsonl"))
    found: dict[str, object] = {"preset": preset, "seed": seed, "commit": attempts[-1]["commit"]}
    # Nobody noted the time of an attempt that was killed together with this script.
    spent = [attempt["cpu_s"] for attempt in attempts]
    found["cpu_s"] = None if None in spent else round(sum(spent))
    found["steps"] = max(row["step"] for row in rows)
    found["episodes"] = max(row.get("rollout/episodes_finished", 0) for row in rows)
    for evaluation_set in ("valid", "test"):
        before, after = scores(rows, evaluation_set, "sampled")
        found[evaluation_set] = {
            "start": vars_of(before),
            "end": vars_of(after),
            "gain": vars_of(rate_difference(before, after)),
        }
    return found


def shown(value: dict[str, float]) -> str:
    return str(Interval(**value))


def written() -> dict[tuple[str, int], dict[str, object]]:
    """Return the rows of the table by preset and seed."""
    found = json.loads(RESULT.read_text())["rows"] if RESULT.exists() else []
    return {(row["preset"], row["seed"]): row for row in found}


def write_table(directory: Path) -> None:
    """Print and write what the finished runs of a directory reached, beside what is written of others."""
    rows = written()
    for preset in PRESETS:
        for run in directory.glob(f"{preset}_seed*"):
            if (run / "model").exists():
                seed = int(run.name.rpartition("seed")[2])
                rows[preset, seed] = entry(preset, seed, run)
    entries = [rows[key] for key in sorted(rows, key=lambda key: (list(PRESETS).index(key[0]), key[1]))]
    content = {"command": "python benchmarks/learning/presets.py", "rows": entries}
    RESULT.write_text(json.dumps(content, indent=1) + "\n")
    print(
        "| preset | seed | valid | start | end | gain | episodes | CPU s |\n|---|---|---|---|---|---|---:|---:|"
    )
    for found in entries:
        test, valid = found["test"], found["valid"]
        cells = [f"`{found['preset']}`", str(found["seed"]), shown(valid["end"])]
        cells += [shown(test["start"]), shown(test["end"]), shown(test["gain"])]
        print(f"| {' | '.join(cells)} | {found['episodes']:.0f} | {found['cpu_s']} |")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--presets", nargs="+", choices=PRESETS, default=list(PRESETS))
    parser.add_argument("--directory", type=Path, default=ROOT / "runs" / "presets")
    parser.add_argument("--new", action="store_true", help="make only the runs that the table does not have")
    parser.add_argument("--table", action="store_true", help="make no runs")
    options = parser.parse_args()
    directory = options.directory.absolute()
    directory.mkdir(parents=True, exist_ok=True)
    skipped = written() if options.new else {}
    for seed in [] if options.table else options.seeds:
        for preset in options.presets:
            run = directory / f"{preset}_seed{seed}"
            if not (run / "model").exists() and (preset, seed) not in skipped:
                print(f"--- {run.name}", flush=True)
                train(preset, seed, run)
    write_table(directory)


if __name__ == "__main__":
    main()
