"""What `roll-env check` says of every built-in environment.

    python benchmarks/environments/checks.py --out benchmarks/results/environment_checks.json

With ids, only those are checked anew. It exits with 1 where a check has failed.
"""

import argparse
import contextlib
import io
import json
import sys
from collections import Counter
from pathlib import Path

from clients.commands.main import main as roll_env
from envs.registry import builtin_environments


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


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ids", nargs="*", help="Only these (default: all that are built in).")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    found = json.loads(options.out.read_text()) if options.out.exists() else {}
    for env_id in options.ids or builtin_environments():
        found[env_id] = checked(env_id)
        print(env_id, found[env_id]["counts"], flush=True)
        ordered = {known: found[known] for known in builtin_environments() if known in found}
        options.out.write_text(json.dumps(ordered, indent=1) + "\n")
    sys.exit(any("FAIL" in each["counts"] for each in found.values()))


if __name__ == "__main__":
    main()
