"""CodeTests-v0 on every recorded program: canonical solutions, mutants and failures of HumanEval and MBPP."""

import argparse
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rollgym.clients.measuring.revision import revision
from rollgym.envs.verifiers.base import Verdict
from rollgym.envs.verifiers.code_tests import CodeTestsEnv

ROOT = Path(__file__).parents[2]
_local = threading.local()


def verifier(seconds: float) -> CodeTestsEnv:
    """Return the verifier of this thread."""
    if not hasattr(_local, "verifier"):
        _local.verifier = CodeTestsEnv(seconds=seconds)
    return _local.verifier


def judged(
    rows: Sequence[dict[str, Any]], judge: Callable[[dict[str, Any]], tuple[Verdict, bool]], workers: int
) -> dict[str, Any]:
    """Judge rows; return how many agree with the record, and which do not."""
    began = time.perf_counter()
    with ThreadPoolExecutor(workers) as pool:
        found = list(pool.map(judge, rows))
    apart = [
        {"id": row["id"], "kind": row["kind"], "outcome": verdict.outcome, "detail": verdict.detail}
        for row, (verdict, agrees) in zip(rows, found, strict=True)
        if not agrees
    ]
    return {
        "rows": len(rows),
        "agree": len(rows) - len(apart),
        "kinds": dict(Counter(row["kind"] for row in rows)),
        "outcomes": dict(Counter(verdict.outcome for verdict, _ in found)),
        "apart": apart,
        "seconds": round(time.perf_counter() - began, 1),
    }


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file."""
    with path.open() as file:
        return [json.loads(line) for line in file]


def commit() -> str:
    """Return the commit that is measured."""
    return revision()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()

    def human_eval(row: dict[str, Any]) -> tuple[Verdict, bool]:
        fields = {"prompt": "", "entry_point": row["entry_point"], "test": row["test"]}
        verdict = verifier(options.seconds).score(f"```python\n{row['code']}\n```", fields)
        agrees = verdict.outcome != "error" and (verdict.outcome == "correct") == row["expected_pass"]
        return verdict, agrees

    def mbpp(row: dict[str, Any]) -> tuple[Verdict, bool]:
        fields = {name: row[name] for name in ("prompt", "test_list")}
        verdict = verifier(options.seconds).score(f"```python\n{row['code']}\n```", fields)
        return verdict, verdict.outcome != "error" and abs(verdict.score - row["pass_fraction"]) < 1e-9

    result = {
        "command": "python benchmarks/conformance/recorded_code.py",
        "commit": commit(),
        "HumanEval": judged(read(options.data / "code_humaneval.jsonl"), human_eval, options.workers),
        "MBPP": judged(read(options.data / "code_mbpp_sample.jsonl"), mbpp, options.workers),
    }
    (ROOT / "benchmarks" / "results" / "code_conformance.json").write_text(
        json.dumps(result, indent=1) + "\n"
    )
    for name in ("HumanEval", "MBPP"):
        print(f"{name}: {result[name]['agree']} of {result[name]['rows']} agree, {result[name]['seconds']} s")
        for each in result[name]["apart"]:
            print("  apart:", each)
    return int(bool(result["HumanEval"]["apart"] or result["MBPP"]["apart"]))


if __name__ == "__main__":
    sys.exit(main())
