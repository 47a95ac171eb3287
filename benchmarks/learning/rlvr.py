"""Sums, choices and instructions in one run: does the policy rise in every domain?

    python benchmarks/learning/rlvr.py [--seeds 0 1 2]

Writes the questions, lets the tiny policy read examples of their form (`roll-train sft`), and trains it with
benchmarks/learning/rlvr.yaml; a third of each step's tasks is of each domain. Questions of the panels are in neither.
Finished runs are skipped and killed ones go on. The table is printed and written to benchmarks/results/rlvr.json.
"""

import argparse
import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from clients.measuring.statistics import success_rate
from envs.core.splits import split_of_text
from trainer.core.run_files import read_lines

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


def choice(rng: random.Random) -> dict[str, object]:
    """Draw four numbers, of which the largest is asked for."""
    numbers = rng.sample(range(10, 100), 4)
    largest = numbers.index(max(numbers))
    return {
        "question": "Which number is the largest?",
        "options": [str(number) for number in numbers],
        "answer": largest,
    }


def instruction(rng: random.Random) -> dict[str, object]:
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


def chosen(rng: random.Random) -> dict[str, str]:
    """Draw a choice and its answer."""
    row = choice(rng)
    letters = "ABCD"
    options = "\n".join(f"{letters[place]}) {text}" for place, text in enumerate(row["options"]))  # type: ignore[arg-type]
    return example(f"{row['question']}\n{options}", letters[row["answer"]])  # type: ignore[index]


def followed(rng: random.Random) -> dict[str, str]:
    """Draw an instruction and a reply that follows it."""
    row = instruction(rng)
    count = int(str(row["prompt"]).split()[2])
    words = row["kwargs"][0]["keywords"]  # type: ignore[index]
    return example(str(row["prompt"]), " ".join((words * count)[:count]))


def example(prompt: str, completion: str) -> dict[str, str]:
    return {"prompt": prompt, "completion": completion}


def write_data() -> None:
    """Write questions and examples; what is there already stays."""
    DATA.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    for name, draw in (("choices", choice), ("instructions", instruction)):
        test = [draw(rng) for _ in range(300)]
        seen = {json.dumps(row) for row in test}
        train = [row for row in (draw(rng) for _ in range(3000)) if json.dumps(row) not in seen]
        _write(f"{name}_test", test)
        _write(f"{name}_train", train)
    kinds: tuple[Callable[[random.Random], dict[str, str]], ...] = (sum_of_three, chosen, followed)
    _write("examples", [draw(rng) for _ in range(2000) for draw in kinds])


def _write(name: str, rows: list[dict[str, object]] | list[dict[str, str]]) -> None:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (DATA / f"{name}.jsonl").write_text(text, encoding="utf-8")


def play(seed: int) -> Path:
    """Let the policy read, then train it; gives the run's folder."""
    read, run = (ROOT / "runs" / "rlvr" / f"{kind}_seed{seed}" for kind in ("read", "seed"))
    shared = [f"seed={seed}", "checkpoint.resume=auto"]
    if not (read / "model").exists():
        words = [
            "sft.data=[{path: runs/rlvr/data/examples.jsonl}]",
            "sft.epochs=3",
            "model.device=cpu",
            "model.layers=3",
        ]
        words += ["model.max_length=96", "threads=1", "optimizer.learning_rate=2e-3", f"output_dir={read}"]
        subprocess.run([sys.executable, "-m", "trainer.cli", "sft", *words, *shared], check=True, cwd=ROOT)
    if not (run / "curves.png").exists():
        words = [f"model.path={read / 'model'}", f"output_dir={run}"]
        command = [sys.executable, "-m", "trainer.cli", "--config", CONFIG, *words, *shared]
        subprocess.run(command, check=True, cwd=ROOT)
    return run


def ends(run: Path) -> dict[str, dict[str, float]]:
    """Sampled success of each domain's panel at both ends of a run, with its interval at the end."""
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
    revision = ["git", "rev-parse", "HEAD"]
    commit = subprocess.run(revision, capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip()
    command = f"python benchmarks/learning/rlvr.py --seeds {' '.join(map(str, options.seeds))}"
    RESULTS.write_text(json.dumps({"command": command, "commit": commit, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
