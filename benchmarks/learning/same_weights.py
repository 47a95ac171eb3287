"""Do two checkouts train the same weights, to the bit? What one measured is then true of the other.

    git worktree add ../before COMMIT
    python benchmarks/learning/same_weights.py --before ../before

Every preset of benchmarks/learning/presets.py, the examples of verifiable rewards, of Sokoban and of a policy that sees
take a few steps in both; compared are the digests of every step's tokens, rewards and weights. Written:
benchmarks/results/same_weights.json.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from presets import CONFIG, PRESETS, overrides

from rollgym.clients.measuring.revision import revision
from rollgym.trainer.core.run_files import read_lines

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "same_weights.json"
SHORT = (
    "evaluation={every: 0, sets: {}}",
    "checkpoint={every: 100}",
    "tracking={tensorboard: false, digests: true}",
    "deterministic=true",
    "threads=1",
)
WARM = "warm_start={demonstrations: 60, epochs: 1, batch_rows: 32, learning_rate: 2.0e-3}"
OTHERS: dict[str, tuple[str, ...]] = {
    "verifiable_rewards": ("--config", "examples/verifiable_rewards.yaml"),
    "frozen_lake": ("--config", "examples/frozen_lake.yaml", "rollout.groups_per_step=8"),
    "frozen_lake_image": ("--config", "examples/frozen_lake_image.yaml", "rollout.groups_per_step=4"),
    "sokoban": ("--config", "examples/sokoban.yaml", "rollout.groups_per_step=16", WARM),
    "sokoban_roll": ("--config", "examples/sokoban_roll.yaml", "rollout.groups_per_step=16", WARM),
}


def runs() -> dict[str, list[str]]:
    """Return the words of the command line of each run."""
    words = {preset: ["--config", CONFIG, *overrides(preset), WARM] for preset in PRESETS}
    return words | {name: list(others) for name, others in OTHERS.items()}


def trained(checkout: Path, words: list[str], steps: int) -> list[dict[str, object]]:
    """Train in a checkout, and return digests of the weights after each step, and of what it has drawn."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "rollgym.trainer.cli",
            *words,
            *SHORT,
            f"steps={steps}",
            f"output_dir={folder}",
        ]
        done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{checkout}: {' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
        return list(read_lines(Path(folder) / "digests.jsonl"))


def commit_of(checkout: Path) -> str:
    """Return the commit that a checkout holds."""
    return revision(checkout)


def main() -> None:
    """Train everything in both checkouts, in turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, required=True, help="the other checkout")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--only", nargs="*", help="names of runs; all of them if not given")
    options = parser.parse_args()
    rows = []
    for name, words in runs().items():
        if options.only and name not in options.only:
            continue
        before, now = (trained(each, words, options.steps) for each in (options.before, ROOT))
        rows.append({"run": name, "equal": before == now, "weights": [step["weights"] for step in now]})
        print(f"{name}: {'equal' if before == now else f'APART: {before} {now}'}", flush=True)
    content = {
        "command": "python benchmarks/learning/same_weights.py --before ../before",
        "before": commit_of(options.before),
        "now": commit_of(ROOT),
        "steps": options.steps,
        "rows": rows,
    }
    RESULT.write_text(json.dumps(content, indent=1) + "\n")
    if not all(row["equal"] for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
