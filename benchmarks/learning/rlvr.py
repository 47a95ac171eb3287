"""Sums, choices and instructions in one run: does the policy rise in every domain?

    python benchmarks/learning/rlvr.py [--seeds 0 1 2]

Writes the questions, lets the tiny policy read examples of all three (`roll-train sft`), most of them sums, which are
the hardest, and trains it with benchmarks/learning/rlvr.yaml; a third of each step's tasks is of each domain. Questions
of the evaluation sets are in neither.
Finished runs are skipped and killed ones go on. The table is printed and written to benchmarks/results/rlvr.json.
"""

import argparse
import itertools
import json
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rollgym.clients.measuring.revision import revision
from rollgym.clients.measuring.statistics import success_rate
from rollgym.envs.core.splits import split_of_text
from rollgym.trainer.core.run_files import read_lines

ROOT = Path(__file__).parents[2]
CONFIG = "benchmarks/learning/rlvr.yaml"
RESULTS = ROOT / "benchmarks" / "results" / "rlvr.json"
DOMAINS = ("sums", "choices", "instructions")
DATA = ROOT / "runs" / "rlvr" / "data"
WORDS = [
    "Left",
    "Right",
    "Up",
    "Down",
    "player",
    "box",
    "target",
    "wall",
    "floor",
    "hole",
    "goal",
    "ice",
    "lake",
    "grid",
]


def choice(rng: random.Random) -> dict[str, Any]:
    """Draw four numbers, of which the largest is asked for."""
    numbers = rng.sample(range(10, 100), 4)
    largest = numbers.index(max(numbers))
    return {
        "question": "Which number is the largest?",
        "options": [str(number) for number in numbers],
        "answer": largest,
    }


def instruction(rng: random.Random) -> dict[str, Any]:
    """Draw two words to use and a number of words to write."""
    words, count = rng.sample(WORDS, 2), rng.randint(2, 5)
    return {
        "prompt": f"Reply with {count} words. Use '{words[0]}' and '{words[1]}'.",
        "instruction_id_list": [
            "keywords:existence",
            "length_constraints:number_words",
            "length_constraints:number_words",
        ],
        "kwargs": [
            {"keywords": words},
            {"relation": "at least", "num_words": count},
            {"relation": "less than", "num_words": count + 1},
        ],
    }


def sum_of_three(rng: random.Random) -> dict[str, str]:
    """Draw a question of Arithmetic-v0's split `train` and its answer: an example to read."""
    while True:
        first, second, third = (rng.randint(0, 9) for _ in range(3))
        signs = [rng.choice((1, -1)) for _ in range(2)]
        text = f"{first} {'+' if signs[0] > 0 else '-'} {second} {'+' if signs[1] > 0 else '-'} {third}"
        if split_of_text(text) == "train":
            return example(f"{text} = ?", f"{first + signs[0] * second + signs[1] * third}")


def chosen(row: dict[str, Any]) -> dict[str, str]:
    """Return a choice with its answer."""
    letters = "ABCD"
    options = "\n".join(f"{letters[place]}) {text}" for place, text in enumerate(row["options"]))
    return example(f"{row['question']}\n{options}", letters[row["answer"]])


def followed(row: dict[str, Any]) -> dict[str, str]:
    """Return an instruction with a reply that follows it."""
    count = int(row["prompt"].split()[2])
    words = row["kwargs"][0]["keywords"]
    return example(row["prompt"], " ".join((words * count)[:count]))


def example(prompt: str, completion: str) -> dict[str, str]:
    return {"prompt": prompt, "completion": completion}


def write_data() -> None:
    """Write questions and examples, the same ones each time."""
    DATA.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    examples = [sum_of_three(rng) for _ in range(4000)]
    domains = (("choices", choice, chosen, 1000), ("instructions", instruction, followed, 700))
    for name, draw, answered, count in domains:
        test = [draw(rng) for _ in range(300)]
        train = _others(draw, rng, test, 3000)
        _write(f"{name}_test", test)
        _write(f"{name}_train", train)
        examples += [answered(row) for row in _others(draw, rng, test, count)]
    _write("examples", examples)


def _others(
    draw: Callable[[random.Random], dict[str, Any]],
    rng: random.Random,
    test: Sequence[dict[str, Any]],
    count: int,
) -> list[dict[str, Any]]:
    """Draw so many rows, none of which is among those of the test."""
    seen = {json.dumps(row) for row in test}
    drawn = (draw(rng) for _ in itertools.count())
    return list(itertools.islice((row for row in drawn if json.dumps(row) not in seen), count))


def _write(name: str, rows: Sequence[dict[str, Any]]) -> None:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (DATA / f"{name}.jsonl").write_text(text, encoding="utf-8")


def play(seed: int) -> Path:
    """Let the policy read, then train it; gives the run's folder."""
    read, run = (ROOT / "runs" / "rlvr" / f"{kind}_seed{seed}" for kind in ("read", "seed"))
    shared = [f"seed={seed}", "checkpoint.resume=auto"]
    if not (read / "model").exists():
        words = [
            "sft.data=[{path: runs/rlvr/data/examples.jsonl}]",
            "sft.epochs=2",
            "model.device=cpu",
            "model.layers=3",
        ]
        words += ["model.max_length=96", "threads=1", "optimizer.learning_rate=2e-3", f"output_dir={read}"]
        subprocess.run(
            [sys.executable, "-m", "rollgym.trainer.cli", "sft", *words, *shared], check=True, cwd=ROOT
        )
    if not (run / "curves.png").exists():
        words = [f"model.path={read / 'model'}", f"output_dir={run}"]
        command = [sys.executable, "-m", "rollgym.trainer.cli", "--config", CONFIG, *words, *shared]
        subprocess.run(command, check=True, cwd=ROOT)
    return run


def ends(run: Path) -> dict[str, dict[str, float]]:
    """Sampled success of each domain's evaluation set at both ends of a run, with its interval at the end."""
    rows = [
        row for row in read_lines(run / "metrics.jsonl") if f"evaluate/{DOMAINS[0]}/sampled/success" in row
    ]
    found = {}
    for domain in DOMAINS:
        key = f"evaluate/{domain}/sampled"
        last = rows[-1]
        end = success_rate(
            round(last[f"{key}/success"] * last[f"{key}/episodes"]), round(last[f"{key}/episodes"])
        )
        found[domain] = {
            "start": rows[0][f"{key}/success"],
            "end": end.value,
            "low": end.low,
            "high": end.high,
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    write_data()
    rows = {f"seed {seed}": ends(play(seed)) for seed in options.seeds}
    print(f"| | {' | '.join(DOMAINS)} |\n|---|---|---|---|")
    for name, found in rows.items():
        cells = [
            f"{each['start']:.3f} to {each['end']:.3f} [{each['low']:.3f}, {each['high']:.3f}]"
            for each in found.values()
        ]
        print(f"| {name} | {' | '.join(cells)} |")
    commit = revision()
    command = f"python benchmarks/learning/rlvr.py --seeds {' '.join(map(str, options.seeds))}"
    RESULTS.write_text(json.dumps({"command": command, "commit": commit, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
