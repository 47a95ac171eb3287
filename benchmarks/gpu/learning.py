"""Runs of a small instruct model, side by side on one device until their time is over, and what each has learnt.

    python benchmarks/gpu/learning.py --seconds 270 --model FOLDER --work runs/learning --output learning.json
    python benchmarks/gpu/learning.py --seed 1 ...                     # the same with another seed
    python benchmarks/gpu/learning.py --rate 3 --only FrozenLake sums ...  # at three times their learning rate

Each run begins with an evaluation, trains until two thirds of the time are over, is asked to end in order, and its last
policy plays the evaluation set again.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import yaml
from side_by_side import WITHOUT_BOARDS, last_line, records, said_of_health, start, tiny, wait

ROOT = Path(__file__).resolve().parents[2]
RUNS = {
    "FrozenLake": "examples/pretrained/frozen_lake.yaml",
    "sums": "examples/pretrained/arithmetic.yaml",
    "Sokoban": "examples/pretrained/sokoban.yaml",
    "WebShop": "examples/pretrained/webshop.yaml",
    "tools": "examples/pretrained/tools.yaml",
}
_BESIDE = tuple(f"evaluation.sets.{name}.episodes=64" for name in ("larger", "other_symbols", "frozen_lake"))
OWN = {"Sokoban": _BESIDE}
"""Settings of single runs: sets that nothing is trained on have fewer tasks, since time is short."""
_CURVE = (
    "step",
    "rollout/success",
    "rollout/reward",
    "policy/entropy",
    "mismatch/k3",
    "time/step_s",
    "time/rollout_s",
)
_POINTS = 20
"""Steps of a run that are kept in the results."""
_LINES = 5
"""Lines on a run's health that are kept."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=270.0)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, default=1.0, help="times the learning rates of the examples")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    begun = time.monotonic()
    folders = {name: options.work / name for name in options.only}
    steps = 2 if options.tiny else 100_000
    trained = wait(
        {
            name: start(folder, "train", words_of(name, folder, steps, options))
            for name, folder in folders.items()
        },
        begun + 0.6 * options.seconds,
        0.12 * options.seconds,
    )
    left = options.seconds - (time.monotonic() - begun)
    measured = wait(
        {
            name: start(folder, "eval", words_of(name, folder, steps, options))
            for name, folder in folders.items()
            if records(folder)
        },
        time.monotonic() + 0.8 * left,
        0.1 * left,
    )
    found = {
        name: {
            "seed": options.seed,
            "rate": options.rate,
            **_figures(folder, trained[name], measured.get(name)),
        }
        for name, folder in folders.items()
    }
    options.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({name: {**each, "curve": None} for name, each in found.items()}, indent=1))
    return 0 if all(each["steps"] for each in found.values()) else 1


def words_of(name: str, folder: Path, steps: int, options: argparse.Namespace) -> list[str]:
    """Return what follows `roll-train` for a run."""
    words = ["--config", str(ROOT / RUNS[name]), *([f"model.path={options.model}"] if options.model else [])]
    words += [
        f"output_dir={folder}",
        f"steps={steps}",
        f"seed={options.seed}",
        "checkpoint={every: 1000, keep: 1, resume: auto}",
        *WITHOUT_BOARDS,
        *OWN.get(name, ()),
    ]
    if options.rate != 1.0:
        optimizer = yaml.safe_load((ROOT / RUNS[name]).read_text(encoding="utf-8"))["optimizer"]
        words.append(f"optimizer.learning_rate={options.rate * optimizer['learning_rate']:g}")
    return tiny(words) if options.tiny else words


def _figures(folder: Path, trained: int, measured: int | None) -> dict[str, Any]:
    lines = records(folder)
    steps = [line for line in lines if "rollout/success" in line]
    curve = [
        {key: line[key] for key in _CURVE if key in line} for line in steps[:: max(1, len(steps) // _POINTS)]
    ]
    evaluated = [
        {key: value for key, value in line.items() if key == "step" or key.startswith("eval")}
        for line in lines
        if any(key.startswith("eval") for key in line)
    ]
    return {
        "train_exit_code": trained,
        "eval_exit_code": measured,
        "steps": len(steps),
        "evaluated": evaluated,
        "health": said_of_health(folder.with_suffix(".train.log"))[:_LINES],
        "last_words": [last_line(folder.with_suffix(f".{command}.log")) for command in ("train", "eval")],
        "curve": curve,
    }


if __name__ == "__main__":
    raise SystemExit(main())
