"""Every cheat of the tests on every form of an item, and every honest program: what each is paid."""

import argparse
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from recorded_code import commit, verifier  # noqa: E402

from tests.support.code_cheats import FUNCTION_CHEATS, HONEST_FUNCTIONS, PROGRAM_CHEATS  # noqa: E402
from tests.support.code_items import CASES, FUNCTION_ITEMS, HONEST_PROGRAM, PROGRAM_ITEMS  # noqa: E402

# What a constant, or one place in an order, is right for by chance.
_BY_CHANCE = 2 / len(CASES)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    work = [
        *((form, name, code, True) for form in FUNCTION_ITEMS for name, code in FUNCTION_CHEATS.items()),
        *((form, name, code, True) for form in PROGRAM_ITEMS for name, code in PROGRAM_CHEATS.items()),
        *((form, name, code, False) for form in FUNCTION_ITEMS for name, code in HONEST_FUNCTIONS.items()),
        *((form, "plain", HONEST_PROGRAM, False) for form in PROGRAM_ITEMS),
    ]

    def judge(each: tuple[str, str, str, bool]) -> dict[str, object] | None:
        form, name, code, cheats = each
        item = {**FUNCTION_ITEMS, **PROGRAM_ITEMS}[form]()
        verdict = verifier(options.seconds).score(f"```python\n{code}```", item)
        fine = (
            verdict.outcome in ("wrong", "partial") and verdict.score <= _BY_CHANCE
            if cheats
            else verdict.score == 1
        )
        if fine:
            return None
        return {
            "form": form,
            "name": name,
            "score": verdict.score,
            "outcome": verdict.outcome,
            "detail": verdict.detail,
        }

    began = time.perf_counter()
    with ThreadPoolExecutor(options.workers) as pool:
        failures = [failure for failure in pool.map(judge, work) if failure is not None]
    cheats = sum(each[3] for each in work)
    result = {
        "command": "python benchmarks/conformance/code_cheats.py",
        "commit": commit(),
        "cheats": cheats,
        "honest": len(work) - cheats,
        "forms": [*FUNCTION_ITEMS, *PROGRAM_ITEMS],
        "misjudged": failures,
        "seconds": round(time.perf_counter() - began, 1),
    }
    (ROOT / "benchmarks" / "results" / "code_cheats.json").write_text(json.dumps(result, indent=1) + "\n")
    print(
        f"{cheats} cheats and {len(work) - cheats} honest programs, {len(failures)} misjudged, {result['seconds']} s"
    )
    for failure in failures:
        print("  ", failure)
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
