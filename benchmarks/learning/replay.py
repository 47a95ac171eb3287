"""Random steps of an asynchronous run taken again from its records: are the weights those that the run had?

    python benchmarks/learning/replay.py            # a run of 60 steps, then 20 of its steps

Written: benchmarks/results/replay.json.
"""

import argparse
import contextlib
import io
import json
import random
import re
import tempfile
import time
from pathlib import Path

from rollgym.trainer.cli import main as roll_train

RESULT = Path(__file__).resolve().parents[1] / "results" / "replay.json"
WORDS = (
    "--config",
    "examples/frozen_lake_async.yaml",
    "rollout.groups_per_step=8",
    "evaluation={every: 0, sets: {}}",
    "checkpoint={every: 10, keep: 100}",
    "tracking={tensorboard: false, digests: true}",
)
_TOLD = re.compile(r"step (\d+): weights \w+, (as recorded|DIFFER)")


def main() -> None:
    """Make the run, take steps of it again, and write what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--replayed", type=int, default=20)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        assert roll_train([*WORDS, f"steps={options.steps}", f"output_dir={folder}"]) == 0
        ran_s = time.monotonic() - began
        run = Path(folder)
        lines = [json.loads(line) for line in (run / "digests.jsonl").read_text().splitlines()]
        episodes = [json.loads(line) for line in (run / "episodes.jsonl").read_text().splitlines()]
        chosen = sorted(random.Random(12).sample(range(options.steps), options.replayed))
        results = {}
        for name, steps in (("at_once", [chosen]), ("from_checkpoints", [[step] for step in chosen])):
            began, equal = time.monotonic(), []
            for each in steps:
                told = io.StringIO()
                with contextlib.redirect_stdout(told):
                    roll_train(["replay", folder, *(word for step in each for word in ("--step", str(step)))])
                equal += [int(step) for step, said in _TOLD.findall(told.getvalue()) if said == "as recorded"]
            results[name] = {"equal": sorted(equal), "seconds": round(time.monotonic() - began, 1)}
        lags = [each["step"] - each["group"]["admitted_version"] for each in episodes]
    RESULT.write_text(
        json.dumps(
            {
                "run_steps": options.steps,
                "run_seconds": round(ran_s, 1),
                "distinct_weights": len({line["weights"] for line in lines}),
                "episodes_of_older_versions": sum(lag > 0 for lag in lags) / len(lags),
                "chosen": chosen,
                **results,
            },
            indent=1,
        )
        + "\n"
    )
    print(RESULT.read_text())


if __name__ == "__main__":
    main()
