"""What `roll-env audit` says of every built-in environment, as its author would run it: without arguments.

    python benchmarks/environments/audits.py --out benchmarks/results/environment_audits.json

With ids, only those are audited anew. It exits with 1 where an audit has failed.
"""

import contextlib
import io
import json
import tempfile
from pathlib import Path

from records import keep

from rollgym.clients.cli.main import main as roll_env


def audited(env_id):
    """How many checks ended how, what those say that did not pass, and how long each part took."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        path = Path(folder) / "card.json"
        roll_env(["audit", env_id, "--json", str(path)])
        card = json.loads(path.read_text())
    return {
        "counts": card["counts"],
        "about": card["about"],
        "not_ok": [
            {name: each[name] for name in ("section", "check", "verdict", "detail")}
            for each in card["entries"]
            if each["verdict"] in ("warning", "failed")
        ],
    }


if __name__ == "__main__":
    keep(__doc__, audited, lambda record: record["counts"].get("failed"))
