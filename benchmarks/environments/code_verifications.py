"""How many programs CodeTests-v0 scores in a second, and what one costs the verifier beside its sandbox."""

import argparse
import json
import os
import resource
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rollgym.clients.measuring.revision import revision
from rollgym.envs.code.sandboxes import operator_sandbox
from rollgym.envs.verifiers.code_tests import CodeTestsEnv

ROOT = Path(__file__).parents[2]
_ASSERTS = [f"assert add({a}, {b}) == {a + b}" for a, b in ((1, 2), (3, 4), (-1, 1), (0, 0), (7, 8))]
_ITEMS: dict[str, tuple[dict[str, Any], str]] = {
    "5 calls": ({"prompt": "Add two numbers.", "test_list": _ASSERTS}, "def add(a, b):\n    return a + b\n"),
    "50 calls": (
        {
            "question": "Add two numbers.",
            "input_output": {
                "fn_name": "add",
                "inputs": [[number, 1] for number in range(50)],
                "outputs": [number + 1 for number in range(50)],
            },
        },
        "def add(a, b):\n    return a + b\n",
    ),
    "10 programs": (
        {
            "question": "Add two numbers.",
            "input_output": {
                "inputs": [f"{number} 1\n" for number in range(10)],
                "outputs": [f"{number + 1}\n" for number in range(10)],
            },
        },
        "print(sum(map(int, input().split())))\n",
    ),
    "5 tests that are run": (
        {"prompt": "Add two numbers.", "test_list": [f"x = add({n}, 1)\nassert x > {n}" for n in range(5)]},
        "def add(a, b):\n    return a + b\n",
    ),
}


def measure(name: str, count: int, workers: int) -> dict[str, Any]:
    fields, code = _ITEMS[name]
    environment = CodeTestsEnv()
    times: list[float] = []

    def one(number: int) -> None:
        began = time.perf_counter()
        # No two programs are equal.
        verdict = environment.score(f"```python\n{code}# {number}\n```", fields)
        times.append(time.perf_counter() - began)
        if verdict.outcome != "correct":
            raise SystemExit(f"{name}: {verdict}")

    one(-1)
    times.clear()
    before, began = _processor_seconds(), time.perf_counter()
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(one, range(count)))
    took = time.perf_counter() - began
    return {
        "item": name,
        "workers": workers,
        "verifications_per_s": round(count / took, 1),
        "p50_ms": round(1000 * statistics.median(times), 1),
        "least_ms": round(1000 * min(times), 1),
        "own_processor_ms": round(1000 * (_processor_seconds() - before) / count, 1),
    }


def _processor_seconds() -> float:
    """Return the processor time of this process, without what runs in the sandbox."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=60)
    options = parser.parse_args()
    rows = [measure(name, options.count, workers) for name in _ITEMS for workers in (1, 2)]
    commit = revision()
    result = {
        "command": "python benchmarks/environments/code_verifications.py",
        "commit": commit,
        "sandbox": operator_sandbox().name,
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "rows": rows,
    }
    (ROOT / "benchmarks" / "results" / "code_verifications.json").write_text(
        json.dumps(result, indent=1) + "\n"
    )
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
