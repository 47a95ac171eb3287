"""FrozenLake learnt through a vLLM server and through the embedded engine: does the curve end at the same height?

    python benchmarks/learning/served.py --vllm /path/to/vllm [--seeds 1 2 3 4] [--served-seeds 1] [--steps 40]
        [--async-steps 40] [--async-episodes 500]

Runs of one seed begin with the same weights and play the same tasks; what differs is who samples. Finished runs are
skipped and killed ones go on, so the script can be started again until it is done. `--only-table` reads what is there.
The table is printed and written to benchmarks/results/served.json.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

from trainer.core.run_files import read_lines
from trainer.core.statistics import mean_interval, success_rate

ROOT = Path(__file__).parents[2]
CONFIG = "examples/frozen_lake_vllm.yaml"
EMBEDDED = ["inference={kind: embedded}", "weights={}"]
ASYNCHRONOUS = ["rollout.max_staleness=1", "algorithm.correction={kind: truncate}"]
PANEL = "evaluate/held_out"


def arms(vllm: str) -> dict[str, list[str]]:
    """Words of the command line by arm: who samples, and how far rollouts run ahead."""
    served = [f"inference.launch.command=[{vllm}]"]
    return {
        "vllm": served,
        "embedded": EMBEDDED,
        "vllm_async": [*served, *ASYNCHRONOUS],
        "embedded_async": [*EMBEDDED, *ASYNCHRONOUS],
    }


def play(run: Path, words: list[str], seed: int, steps: int, episodes: int) -> None:
    """Train one run, or go on with it, or leave it as it is if it is finished."""
    if (run / "curves.png").exists():
        return
    print(f"--- {run.name}", flush=True)
    command = [sys.executable, "-m", "trainer.cli", "--config", CONFIG, *words]
    command += [f"seed={seed}", f"steps={steps}", f"output_dir={run}", "checkpoint.resume=auto"]
    command.append(f"evaluation.panels.held_out.episodes={episodes}")
    subprocess.run(command, check=True, cwd=ROOT)


def reached(run: Path) -> dict[str, object]:
    """What a run's metrics say: both ends of the curve, what weights and probabilities were like, how long it took."""
    rows = read_lines(run / "metrics.jsonl")
    measured = [row for row in rows if f"{PANEL}/sampled/success" in row]
    steps = [row for row in rows if "time/step_s" in row]

    def column(name: str) -> list[float]:
        return [row[name] for row in steps if name in row]

    found: dict[str, object] = {
        "run": run.name,
        "steps": len(steps),
        "seconds": round(sum(column("time/step_s")), 1),
        "tokens_per_s": round(statistics.mean(column("time/tokens_per_s")), 1),
        "success_last_steps": round(statistics.mean(column("rollout/success")[-4:]), 4),
        "lag_max": max(column("rollout/lag_max")),
        "mismatch": {
            "k1_mean": statistics.mean(column("mismatch/k1")),
            "k3_mean": statistics.mean(column("mismatch/k3")),
            "weight_max": max(column("mismatch/weight_max")),
            "ess_min": min(column("mismatch/weight_ess")),
        },
    }
    if differences := column("sync/probe_difference"):
        found["sync"] = {
            "verified": len(differences),
            "largest_difference": max(differences),
            "seconds_median": round(statistics.median(column("sync/seconds")), 3),
            "bytes_each": column("sync/bytes")[0],
        }
    for mode in ("sampled", "greedy"):
        first, last = (
            [row[f"{PANEL}/{mode}/{key}"] for key in ("success", "episodes")]
            for row in (measured[0], measured[-1])
        )
        end = success_rate(round(last[0] * last[1]), round(last[1]))
        found[mode] = {"start": first[0], "end": end.value, "low": end.low, "high": end.high}
    return found


def spread(rows: list[dict[str, object]], arm: str, mode: str) -> str:
    """Mean over an arm's seeds with its 95 % interval, and the range of the seeds."""
    ends = [row[mode]["end"] for row in rows if row["arm"] == arm]  # type: ignore[index]
    return f"{mean_interval(ends)}, seeds from {min(ends):.3f} to {max(ends):.3f}" if ends else "nothing yet"


def spelled(options: argparse.Namespace) -> list[str]:
    """The options that decide what is run, as they are typed."""
    names = ("seeds", "served_seeds", "steps", "episodes", "async_steps", "async_episodes")
    words = []
    for name in names:
        value = getattr(options, name)
        if value is not None:
            shown = " ".join(map(str, value)) if isinstance(value, list) else str(value)
            words.append(f"--{name.replace('_', '-')} {shown}")
    return words


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm", default="vllm", help="vLLM's program, of whatever environment")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--served-seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--episodes", type=int, default=500, help="of the panel, at both ends")
    parser.add_argument("--async-steps", type=int, help="the same as --steps if absent")
    parser.add_argument("--async-episodes", type=int, help="the same as --episodes if absent")
    parser.add_argument("--arms", nargs="+", default=list(arms("vllm")), choices=list(arms("vllm")))
    parser.add_argument("--directory", type=Path, default=ROOT / "runs" / "served")
    parser.add_argument("--only-table", action="store_true", help="train nothing")
    options = parser.parse_args()
    rows: list[dict[str, object]] = []
    for arm, words in arms(options.vllm).items():
        if arm not in options.arms:
            continue
        ahead = arm.endswith("async")
        steps = (ahead and options.async_steps) or options.steps
        episodes = (ahead and options.async_episodes) or options.episodes
        for seed in options.served_seeds if arm.startswith("vllm") else options.seeds:
            run = options.directory.absolute() / f"{arm}_seed{seed}"
            if not options.only_table:
                play(run, words, seed, steps, episodes)
            if (run / "curves.png").exists():
                rows.append({"arm": arm, "seed": seed} | reached(run))
    print("| run | steps | sampled, start to end | greedy, start to end | largest difference of a probe |")
    print("|---|---:|---|---|---:|")
    for row in rows:
        ends = [f"{row[mode]['start']:.3f} to {row[mode]['end']:.3f}" for mode in ("sampled", "greedy")]  # type: ignore[index]
        probe = f"{row['sync']['largest_difference']:.1e}" if "sync" in row else ""  # type: ignore[index]
        print(f"| {row['run']} | {row['steps']} | {ends[0]} | {ends[1]} | {probe} |")
    for arm in options.arms:
        print(f"{arm}: sampled {spread(rows, arm, 'sampled')}; greedy {spread(rows, arm, 'greedy')}")
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True, cwd=ROOT
    )
    command = f"python benchmarks/learning/served.py --vllm VLLM {' '.join(spelled(options))}"
    output = ROOT / "benchmarks" / "results" / "served.json"
    output.write_text(
        json.dumps({"command": command, "commit": commit.stdout.strip(), "rows": rows}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
