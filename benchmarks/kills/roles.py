"""Kills actors of a run on a Ray cluster at random moments, each kind in turn, and says what became of every task.

    nice python benchmarks/kills/roles.py --kills 8 --steps 60 --out benchmarks/results/role_kills.json

A tiny policy learns FrozenLake with two ranks that train, an engine of its own and environments in workers, on a Ray
cluster of this machine that the run starts. Nobody starts anything again but the run itself. Afterwards the metrics
must have every step once, and the ledger every task.
"""

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from rollgym.trainer.records.ledger import Ledger, TaskEvent  # noqa: E402

GROUPS = 4
CONFIG = f"""
seed: 11
deterministic: true
tasks:
  - {{env_id: FrozenLake-v0, kwargs: {{size: 4, split: train, max_episode_steps: 12, format_penalty: -0.1}}}}
model: {{hidden_size: 32, layers: 1, heads: 2, max_length: 128, device: cpu}}
prompt: {{context: single_turn, instruction: none}}
warm_start: {{demonstrations: 100, epochs: 4, batch_rows: 32}}
algorithm: ppo
rollout: {{groups_per_step: {GROUPS}, group_size: 4, max_turns: 12, max_new_tokens: 3}}
evaluation: {{every: 0, sets: {{}}}}
checkpoint: {{every: 2, asynchronous: true}}
tracking: {{tensorboard: false}}
backend: {{kind: fsdp2, ranks: 2}}
cluster:
  kind: ray
  restart_after_s: 0.1
  restarts: 6
  roles: {{actor_inference: {{devices: 2}}, environment: {{actors: 1}}}}
"""
KINDS = ("actor_train_0", "actor_train_1", "actor_inference_0", "environment worker")
PATIENCE_S = 600.0
_PROCESS = re.compile(r"^process (\d+) on ", re.MULTILINE)


def main() -> int:
    """Run, kill and account."""
    options = _options()
    run = options.work / "run"
    config = options.work / "run.yaml"
    options.work.mkdir(parents=True)
    config.write_text(CONFIG)
    words = [sys.executable, "-m", "rollgym.trainer.cli", "--config", str(config), f"output_dir={run}"]
    words.append(f"steps={options.steps}")
    generator, killed = random.Random(options.seed), []
    with (options.work / "output").open("w") as output:
        began = time.monotonic()
        process = subprocess.Popen(words, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        for number in range(options.kills):
            if not _wait_for_step(process, run, options.steps * (number + 1) // (options.kills + 1)):
                break
            time.sleep(generator.uniform(0.0, 1.0))
            kind = KINDS[number % len(KINDS)]
            killed.append({"kind": kind, "after_step": _steps(run), "killed": _kill(run, kind)})
        code = process.wait(PATIENCE_S)
        seconds = time.monotonic() - began
    report = {"exit_code": code, "seconds": round(seconds, 1), "kills": killed} | _account(run, options.steps)
    print(json.dumps(report, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    exact = code == 0 and report["steps"] == list(range(1, options.steps + 1)) and not report["lost"]
    return 0 if exact else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, default=Path("runs") / f"role_kills_{int(time.time())}")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def _steps(run: Path) -> int:
    """The last step that was recorded."""
    path = run / "metrics.jsonl"
    steps = [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []
    return max(steps, default=0)


def _wait_for_step(process: "subprocess.Popen[bytes]", run: Path, step: int) -> bool:
    """Wait until a step was taken; False if the run ended before."""
    until = time.monotonic() + PATIENCE_S
    while _steps(run) < step:
        if process.poll() is not None or time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def _kill(run: Path, kind: str) -> bool:
    """Kill a process of a kind; False where there is none at the moment."""
    if kind == "environment worker":
        found = _titled(b"ray::ActorHost")
    else:
        said = _PROCESS.findall((run / "ranks" / f"{kind}.log").read_text())
        found = [int(said[-1])] if said else []
    for process in found[:1]:
        try:
            os.kill(process, signal.SIGKILL)
        except ProcessLookupError:
            return False
    return bool(found)


def _titled(title: bytes) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (folder / "cmdline").read_bytes().startswith(title):
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def _account(run: Path, steps: int) -> dict[str, object]:
    """Say which steps were recorded, and what became of the tasks."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    ledger = Ledger(run / "ledger.jsonl")
    fates = [ledger.fate(task) for task in range(steps * GROUPS)]
    counts = ledger.counts()
    ledger.close()
    lost = [task for task, fate in enumerate(fates) if fate not in (TaskEvent.TRAINED, TaskEvent.DROPPED)]
    trained = [line["step"] for line in lines if "loss/policy" in line]
    return {"steps": trained, "ledger": counts, "lost": lost}


if __name__ == "__main__":
    sys.exit(main())
