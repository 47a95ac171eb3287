"""Curves of learning from examples, preferences and teachers, on data that is made here, on one core.

    python benchmarks/learning/pipelines.py --only examples      # sft, dpo, reward, distill: a minute
    python benchmarks/learning/pipelines.py                      # and on-policy distillation beside its RL teacher
    python benchmarks/learning/pipelines.py --only lake --seeds 0 1 2

`examples`: chats whose answers are the opposites of the words that are asked, and pairs of right and wrong answers.
`lake`: a policy is trained by examples/frozen_lake.yaml (the run of `make reproduce`, which is taken if it is there),
and another one of the same start learns from it on its own episodes; after how many episodes does each play held-out
lakes as well as the teacher does in the end, but for two points?
Finished runs are skipped and killed ones go on. Written: benchmarks/results/pipelines.json.
"""

import argparse
import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rollgym.clients.measuring.revision import revision

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "benchmarks" / "results" / "pipelines.json"
OPPOSITE = {"Left": "Right", "Right": "Left", "Up": "Down", "Down": "Up"}
SMALL = (
    "model={device: cpu, hidden_size: 48, layers: 2, heads: 4, max_length: 96}",
    "tracking={tensorboard: false}",
    "optimizer.learning_rate=3e-3",
    "checkpoint={every: 20, resume: auto}",
)
ESTIMATES = ("full", "sampled")
LAKE = ("--config", "examples/frozen_lake.yaml", "checkpoint.resume=auto")


def write_data(folder: Path) -> None:
    """Write chats and pairs, to learn from and to measure on."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = random.Random(0)
    for name, count in (("train", 600), ("test", 100)):
        asked = [[drawn.choice(list(OPPOSITE)) for _ in range(drawn.randint(1, 4))] for _ in range(count)]
        answers = [" ".join(OPPOSITE[word] for word in words) for words in asked]
        questions = [" ".join(words) for words in asked]
        chats = [{"prompt": q, "completion": a} for q, a in zip(questions, answers, strict=True)]
        pairs = [{"prompt": q, "chosen": a, "rejected": q} for q, a in zip(questions, answers, strict=True)]
        for kind, rows in (("chats", chats), ("pairs", pairs)):
            (folder / f"{kind}_{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def roll_train(directory: Path, *words: str) -> float:
    """Make a run, or go on with it, and return the seconds that it took."""
    began = time.monotonic()
    if not (directory / "model").exists():
        command = [sys.executable, "-m", "rollgym.trainer.cli", *words, f"output_dir={directory}"]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - began


def curve(directory: Path, name: str) -> list[tuple[int, float]]:
    """Return a metric by step."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], round(line[name], 4)) for line in lines if line.get(name) is not None]


def examples(folder: Path) -> dict[str, Any]:
    """Run sft, then dpo and distill from what it made, and reward."""
    write_data(folder / "data")

    def data(section: str, kind: str) -> list[str]:
        return [
            f"{section}.data=[{{path: {folder}/data/{kind}_train.jsonl}}]",
            f"{section}.held_out=[{{path: {folder}/data/{kind}_test.jsonl}}]",
        ]

    results: dict[str, Any] = {}
    seconds = roll_train(folder / "sft", "sft", *data("sft", "chats"), "sft.epochs=12", *SMALL)
    results["sft"] = {"loss": curve(folder / "sft", "evaluate/held_out/loss"), "seconds": round(seconds, 1)}
    # Preferences begin with a policy that has seen a part of the data once.
    early = folder / "early"
    roll_train(early, "sft", *data("sft", "chats"), "sft.epochs=2", *SMALL)
    from_early = [f"model={{device: cpu, path: {early}/model, max_length: 96}}", *SMALL[1:2], *SMALL[3:]]
    for kind in ("dpo", "ipo", "kto", "orpo", "simpo"):
        words = ["dpo", *data("dpo", "pairs"), "steps=60", f"dpo.loss.kind={kind}", "dpo.held_out_every=20"]
        seconds = roll_train(folder / kind, *words, *from_early, "optimizer.learning_rate=3e-4")
        name = "reward_chosen" if kind == "kto" else "accuracy"
        results[kind] = {
            "loss": curve(folder / kind, "evaluate/held_out/loss"),
            name: curve(folder / kind, f"evaluate/held_out/{name}"),
            "seconds": round(seconds, 1),
        }
    seconds = roll_train(folder / "reward", "reward", *data("reward", "pairs"), "reward.epochs=6", *SMALL)
    results["reward"] = {
        "accuracy": curve(folder / "reward", "evaluate/held_out/accuracy"),
        "seconds": round(seconds, 1),
    }
    teacher = f"distill.teachers={{main: {{path: {folder}/sft/model}}}}"
    for kind in ("forward_kl", "reverse_kl", "jsd"):
        words = [
            "distill",
            *data("distill", "chats"),
            teacher,
            f"distill.divergence={kind}",
            "distill.epochs=6",
        ]
        seconds = roll_train(folder / kind, *words, *SMALL, "seed=1")
        results[f"distill {kind}"] = {
            "loss": curve(folder / kind, "evaluate/held_out/loss"),
            "seconds": round(seconds, 1),
        }
    return results


def episodes_until(found: list[tuple[int, float]], goal: float, per_step: int) -> int | None:
    """Return after how many episodes a measurement came within two points of the goal for the first time."""
    return next((step * per_step for step, value in found if value >= goal - 0.02), None)


def lake(folder: Path, seed: int, estimates: list[str]) -> dict[str, Any]:
    """Train the teacher, have a student of the same start learn from it, and count their episodes."""
    success = "evaluate/held_out/sampled/success"
    teacher = ROOT / "runs" / f"frozen_lake_seed{seed}"
    roll_train(teacher, *LAKE, f"seed={seed}")
    learnt = curve(teacher, success)
    goal = learnt[-1][1]
    head = revision()
    results: dict[str, Any] = {
        "commit": head,
        "goal": goal,
        "reinforcement learning": {
            "episodes_per_step": 256,
            "success": learnt,
            "episodes_to_goal": episodes_until(learnt, goal, 256),
        },
    }
    # Many small steps: nothing is compared within a group, and each step is one update.
    for estimate in estimates:
        student = folder / f"seed{seed}_{estimate}"
        roll_train(
            student, "distill", *LAKE, f"seed={seed}", "algorithm=grpo", "steps=400", "rollout.groups_per_step=16",
            "rollout.group_size=1", "optimizer.learning_rate=2e-3", "checkpoint.every=50", "evaluation.every=50",
            "evaluation.greedy=false", "evaluation.sets.held_out.baselines=false", f"distill.estimate={estimate}",
            f"distill.teachers={{main: {{path: {teacher}/model}}}}",
        )  # fmt: skip
        found = curve(student, success)
        results[f"distill {estimate}"] = {
            "episodes_per_step": 16,
            "success": found,
            "episodes_to_goal": episodes_until(found, goal, 16),
        }
    return results


def main() -> None:
    """Make the runs and write their curves."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=("examples", "lake"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of the lakes' policies")
    parser.add_argument(
        "--estimates", nargs="+", choices=ESTIMATES, default=list(ESTIMATES), help="of the lake"
    )
    parser.add_argument("--directory", type=Path, default=ROOT / "runs" / "pipelines")
    options = parser.parse_args()
    results = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    if options.only in (None, "examples"):
        results["examples"] = examples(options.directory.absolute())
    if options.only in (None, "lake"):
        lakes = results.setdefault("lake", {})
        for seed in options.seeds:
            lakes[f"seed {seed}"] = lake(options.directory.absolute() / "lake", seed, options.estimates)
    RESULT.write_text(json.dumps(results, indent=1) + "\n")
    print(RESULT.read_text())


if __name__ == "__main__":
    main()
