"""What the rollout log costs: CPU seconds of equal runs with it and without it, in turns, and its bytes.

    python benchmarks/kills/cost.py [--pairs 5] [--steps 3] [--out benchmarks/results/rollout_log.json]

The runs are deterministic, so both do the same work, and differ in the log alone; a tiny policy makes the log's share
as large as it can be. CPU seconds are those of the whole trainer's process, from its fork to its end.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import rollgym.trainer.run.train  # noqa: E402, F401 - what every run would import
from rollgym.clients.measuring.revision import revision  # noqa: E402
from rollgym.trainer.records.rollout_log import RolloutLog  # noqa: E402
from tests.support.processes import env_server  # noqa: E402

CONFIG = """
seed: 3
deterministic: true
tasks:
  - {env_id: FrozenLake-v0, kwargs: {size: 4, split: train, max_episode_steps: 8, format_penalty: -0.1}}
model: {hidden_size: 32, layers: 1, heads: 2, max_length: 256}
prompt: {instruction: none}
rollout: {groups_per_step: 8, group_size: 8, max_turns: 8, max_new_tokens: 8, max_concurrent_sequences: 64}
evaluation: {every: 0, sets: {}}
checkpoint: {every: 0}
tracking: {tensorboard: false, console: false}
"""


def cpu_seconds(arguments: list[str], written: Path) -> float:
    """Train in a fork and return its CPU seconds; what its log wrote lies in a file."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, 1)
            close = RolloutLog.close

            def noting(log: RolloutLog) -> None:
                written.write_text(str(log.bytes_written))
                close(log)

            RolloutLog.close = noting  # type: ignore[method-assign]
            from rollgym.trainer.cli import main

            code = main(arguments)
        finally:
            os._exit(code)
    _, status, usage = os.wait4(child, 0)
    if status:
        raise SystemExit(f"a run ended with {status}")
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    seconds: dict[str, list[float]] = {"none": [], "process": [], "machine": []}
    with tempfile.TemporaryDirectory() as folder, env_server() as url:
        config = Path(folder) / "run.yaml"
        config.write_text(CONFIG)
        for pair in range(options.pairs):
            for log in seconds if pair % 2 else reversed(seconds):
                run = Path(folder) / f"{pair}-{log}"
                words = ["--config", str(config), "--env-url", url, f"output_dir={run}"]
                words += [f"steps={options.steps}", f"rollout.log={log}"]
                seconds[log].append(cpu_seconds(words, Path(folder) / "written"))
                print(f"{time.strftime('%X')} pair {pair}, {log}: {seconds[log][-1]:.2f} CPU s", flush=True)
        episodes = [json.loads(line) for line in (run / "episodes.jsonl").open()]
        written = int((Path(folder) / "written").read_text())
    tokens = sum(sum(segment["action_mask"]) for each in episodes for segment in each["segments"])
    turns = sum(len(each["turns"]) for each in episodes)
    result = {
        "command": " ".join(["python", "benchmarks/kills/cost.py", *sys.argv[1:]]),
        "commit": revision(),
        "cpu_seconds": seconds,
        "more_cpu_in_percent_median_of_pairs": {
            log: 100
            * statistics.median(a / b - 1 for a, b in zip(seconds[log], seconds["none"], strict=True))
            for log in ("process", "machine")
        },
        "episodes": len(episodes),
        "turns": turns,
        "sampled_tokens": tokens,
        "log_bytes_per_turn": written / turns,
        "log_bytes_per_sampled_token": written / tokens,
        "episodes_jsonl_bytes_per_token": len(json.dumps([each["segments"] for each in episodes]))
        / sum(len(segment["ids"]) for each in episodes for segment in each["segments"]),
    }
    print(json.dumps(result, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
