"""One record for each built-in environment, kept in a file as they come, so that a run that was ended goes on."""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollgym.envs.registry import builtin_environments


def keep(
    description: str | None, record: Callable[[str], dict[str, Any]], fails: Callable[[Any], bool]
) -> None:
    """Make records, and exit with 1 where one of the file fails.

    Args:
        description: Of the program.
        record: Makes the record of an environment.
        fails: Whether a record says that something failed.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ids", nargs="*", help="Only these (default: all that are built in).")
    parser.add_argument("--missing", action="store_true", help="Only those that the file does not have.")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    found = json.loads(options.out.read_text()) if options.out.exists() else {}
    for env_id in options.ids or builtin_environments():
        if options.missing and env_id in found:
            continue
        found[env_id] = record(env_id)
        print(env_id, found[env_id]["counts"], flush=True)
        ordered = {known: found[known] for known in builtin_environments() if known in found}
        options.out.write_text(json.dumps(ordered, indent=1) + "\n")
    sys.exit(any(fails(each) for each in found.values()))
