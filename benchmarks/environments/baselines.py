"""What the audit says of every built-in environment: who solves it without reading, and how often its expert does.

    python benchmarks/environments/baselines.py --out benchmarks/results/environment_baselines.json

The pages of the environments in `docs/environments/reference` show these (`python -m rollgym.envs.pages`). With ids,
only those are audited anew, and the others stay in the file as they were.
"""

import argparse
import contextlib
import io
import json
import tempfile
from pathlib import Path

from rollgym.clients.cli.main import main as roll_env
from rollgym.envs.registry import builtin_environments

SECTIONS = ("baselines", "verifier", "difficulty")


def audited(env_id, episodes, budget_s):
    """The counts of an audit, and its lines on baselines, verdicts and difficulty."""
    with tempfile.TemporaryDirectory() as folder:
        card_file = Path(folder, "card.json")
        arguments = ["audit", env_id, "--episodes", str(episodes), "--budget-s", str(budget_s)]
        with contextlib.redirect_stdout(io.StringIO()):
            roll_env([*arguments, "--json", str(card_file)])
        card = json.loads(card_file.read_text())
    kept = ("section", "check", "verdict", "detail")
    lines = [
        {name: entry[name] for name in kept} for entry in card["entries"] if entry["section"] in SECTIONS
    ]
    about = {name: card["about"][name] for name in ("version", "episodes", "seed")}
    return {**about, "counts": card["counts"], "entries": lines}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ids", nargs="*", help="Only these (default: all that are built in).")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--episodes", type=int, default=100)
    parser.add_argument("--budget-s", type=float, default=60)
    options = parser.parse_args()
    found = json.loads(options.out.read_text()) if options.out.exists() else {}
    for env_id in options.ids or builtin_environments():
        found[env_id] = audited(env_id, options.episodes, options.budget_s)
        print(env_id, found[env_id]["counts"], flush=True)
        ordered = {known: found[known] for known in builtin_environments() if known in found}
        options.out.write_text(json.dumps(ordered, indent=1) + "\n")


if __name__ == "__main__":
    main()
