"""What `roll-env check` says of every built-in environment.

    python benchmarks/environments/checks.py --out benchmarks/results/environment_checks.json

With ids, only those are checked anew. It exits with 1 where a check has failed.
"""

import contextlib
import io
import json
from collections import Counter

from records import keep

from rollgym.clients.cli.main import main as roll_env


def checked(env_id):
    """How many checks ended how, and what those say that did not pass."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        roll_env(["check", env_id, "--json"])
    findings = json.loads(printed.getvalue())["findings"]
    return {
        "counts": dict(Counter(each["status"] for each in findings)),
        "not_passed": [each for each in findings if each["status"] not in ("PASS", "SKIP")],
    }


if __name__ == "__main__":
    keep(__doc__, checked, lambda record: "FAIL" in record["counts"])
