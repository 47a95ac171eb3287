"""FrozenLake learnt through a vLLM server and through the embedded engine: does the curve end at the same height?

    python benchmarks/learning/served.py --vllm /path/to/vllm [--seeds 1 2 3 4] [--served-seeds 1] [--steps 40]
        [--async-steps 40] [--async-episodes 500] [--agent-steps 16] [--agent-episodes 200]

Runs of one seed begin with the same weights and play the same tasks; what differs is who samples, and in the arms of
the agent who plays: examples/black_box_agent.py, a service on the plain `openai` package that reaches the policy by the
agents' endpoint. Finished runs are skipped and killed ones go on, so the script can be started again until it is done.
`--only-table` reads what is there. The table is printed and written to benchmarks/results/served.json; rows that it has
of runs that are not in the directory stay, each with the commit that it was measured at.
"""

import argparse
import json
import socket
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rollgym.clients.measuring.revision import revision
from rollgym.clients.measuring.statistics import mean_interval, success_rate
from rollgym.trainer.core.run_files import read_lines

ROOT = Path(__file__).parents[2]
CONFIG = "examples/frozen_lake_vllm.yaml"
EMBEDDED = ["inference={kind: embedded}", "weights={}"]
ASYNCHRONOUS = ["rollout.max_staleness=1", "algorithm.correction={kind: truncate}"]
AGENT = ["agents={concurrency: 64}"]
EVALUATION_SET = "evaluate/held_out"
RESULTS = ROOT / "benchmarks" / "results" / "served.json"


def arms(vllm: str) -> dict[str, list[str]]:
    """Words of the command line by arm: who samples, and how far rollouts run ahead."""
    served = [f"inference.launch.command=[{vllm}]"]
    return {
        "vllm": served,
        "embedded": EMBEDDED,
        "vllm_async": [*served, *ASYNCHRONOUS],
        "embedded_async": [*EMBEDDED, *ASYNCHRONOUS],
        "vllm_agent": [*served, *AGENT],
        "embedded_agent": [*EMBEDDED, *AGENT],
    }


@contextmanager
def agent_service(kept: Path) -> Iterator[str]:
    """Serve the black-box agent and give its address: the same one whenever the run is gone on with."""
    if not kept.exists():
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            kept.write_text(str(probe.getsockname()[1]))
    port = kept.read_text()
    command = [sys.executable, "examples/black_box_agent.py", "--serve", port]
    with subprocess.Popen(command, cwd=ROOT) as process:
        try:
            yield f"http://127.0.0.1:{port}/play"
        finally:
            process.terminate()


def play(run: Path, words: list[str], seed: int, steps: int, episodes: int) -> None:
    """Train one run, or go on with it, or leave it as it is if it is finished."""
    if (run / "curves.png").exists():
        return
    print(f"--- {run.name}", flush=True)
    run.parent.mkdir(parents=True, exist_ok=True)
    (run.parent / f"{run.name}.commit").write_text(revision())
    command = [sys.executable, "-m", "rollgym.trainer.cli", "--config", CONFIG, *words]
    command += [f"seed={seed}", f"steps={steps}", f"output_dir={run}", "checkpoint.resume=auto"]
    command.append(f"evaluation.sets.held_out.episodes={episodes}")
    if not run.name.partition("_seed")[0].endswith("_agent"):
        subprocess.run(command, check=True, cwd=ROOT)
        return
    with agent_service(run.parent / f"{run.name}.port") as url:
        subprocess.run([*command, f"rollout.agent={url}"], check=True, cwd=ROOT)


def reached(run: Path) -> dict[str, object]:
    """What a run's metrics say: both ends of the curve, what weights and probabilities were like, how long it took."""
    rows = read_lines(run / "metrics.jsonl")
    measured = [row for row in rows if f"{EVALUATION_SET}/sampled/success" in row]
    steps = [row for row in rows if "time/step_s" in row]

    def column(name: str) -> list[float]:
        return [row[name] for row in steps if name in row]

    found: dict[str, object] = {
        "run": run.name,
        "commit": (run.parent / f"{run.name}.commit").read_text(),
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
            [row[f"{EVALUATION_SET}/{mode}/{key}"] for key in ("success", "episodes")]
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
    names = ["arms", "seeds", "served_seeds", "steps", "episodes"]
    names += ["async_steps", "async_episodes", "agent_steps", "agent_episodes"]
    words = []
    for name in names:
        value = getattr(options, name)
        if value is not None:
            shown = " ".join(map(str, value)) if isinstance(value, list) else str(value)
            words.append(f"--{name.replace('_', '-')} {shown}")
    return words


def kept(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    """Rows of the last table whose runs are not among these, and these."""
    if not RESULTS.exists():
        return rows
    last = json.loads(RESULTS.read_text())
    names = {row["run"] for row in rows}
    found = [{"commit": last.get("commit")} | row for row in last["rows"] if row["run"] not in names]
    return sorted([*found, *rows], key=lambda row: (list(arms("")).index(str(row["arm"])), row["seed"]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm", default="vllm", help="vLLM's program, of whatever environment")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--served-seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--episodes", type=int, default=500, help="of the evaluation set, at both ends")
    parser.add_argument("--async-steps", type=int, help="the same as --steps if absent")
    parser.add_argument("--async-episodes", type=int, help="the same as --episodes if absent")
    parser.add_argument("--agent-steps", type=int, help="the same as --steps if absent")
    parser.add_argument("--agent-episodes", type=int, help="the same as --episodes if absent")
    parser.add_argument("--arms", nargs="+", default=list(arms("vllm")), choices=list(arms("vllm")))
    parser.add_argument("--directory", type=Path, default=ROOT / "runs" / "served")
    parser.add_argument("--only-table", action="store_true", help="train nothing")
    options = parser.parse_args()
    rows: list[dict[str, object]] = []
    for arm, words in arms(options.vllm).items():
        if arm not in options.arms:
            continue
        kind = arm.partition("_")[2]
        steps = (kind and getattr(options, f"{kind}_steps")) or options.steps
        episodes = (kind and getattr(options, f"{kind}_episodes")) or options.episodes
        for seed in options.served_seeds if arm.startswith("vllm") else options.seeds:
            run = options.directory.absolute() / f"{arm}_seed{seed}"
            if not options.only_table:
                play(run, words, seed, steps, episodes)
            if (run / "curves.png").exists():
                rows.append({"arm": arm, "seed": seed} | reached(run))
    rows = kept(rows)
    print("| run | steps | sampled, start to end | greedy, start to end | largest difference of a probe |")
    print("|---|---:|---|---|---:|")
    for row in rows:
        ends = [f"{row[mode]['start']:.3f} to {row[mode]['end']:.3f}" for mode in ("sampled", "greedy")]  # type: ignore[index]
        probe = f"{row['sync']['largest_difference']:.1e}" if "sync" in row else ""  # type: ignore[index]
        print(f"| {row['run']} | {row['steps']} | {ends[0]} | {ends[1]} | {probe} |")
    for arm in arms(""):
        print(f"{arm}: sampled {spread(rows, arm, 'sampled')}; greedy {spread(rows, arm, 'greedy')}")
    command = f"python benchmarks/learning/served.py --vllm VLLM {' '.join(spelled(options))}"
    RESULTS.write_text(json.dumps({"command": command, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
