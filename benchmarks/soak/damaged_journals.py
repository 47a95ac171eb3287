"""Journals are damaged, and nobody goes back in silence: python benchmarks/soak/damaged_journals.py [--journals 200].

Half of the journals are a server's own file, the others are those that two gateways share: a Redis server, of which the
append-only file is damaged. Sessions are played, closed and left in the middle of an episode. Then the journal gets
another bit, an end that is cut off, a page of zeros, a record that is missing, doubled or swapped with the next, as the
server crashes. A server that finds its own file so, or the gateway that has not answered the last steps, is asked for
the next step of each session, and each answer is compared with a model of the environment that shares no line with it.
A node whose sessions have to be rebuilt from the shared journal is gone.

A session goes on where it was, or ends as `session_gone`. One that answers anything else is behind, and a failure, as
is one that was closed and goes on. Journals are kept in FILE (`--out`) as they are looked at; started again with the
same FILE, the run goes on where it was.
"""

import argparse
import asyncio
import json
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# The damage is that of the tests.
sys.path.insert(0, str(ROOT))

from damaged_own import look_at_own  # noqa: E402
from damaged_sessions import Seen  # noqa: E402
from damaged_shared import look_at_shared  # noqa: E402

from rollgym.clients.measuring.revision import revision  # noqa: E402

HALVES: dict[str, Callable[[str], Awaitable[Seen]]] = {"own": look_at_own, "shared": look_at_shared}


def load(path: Path | None, seed: int) -> dict[str, dict[str, Any]]:
    """The journals that were looked at, by half and number."""
    if path is None or not path.exists():
        return {half: {} for half in HALVES}
    content = json.loads(path.read_text())
    if content["seed"] != seed:
        raise SystemExit(f"{path} is of a run with seed {content['seed']}")
    journals: dict[str, dict[str, Any]] = content["journals"]
    return journals


def summary(journals: dict[str, Any]) -> dict[str, Any]:
    """What has become of the sessions of some journals, by the kind of damage."""
    kinds: dict[str, Counter[str]] = {}
    for journal in journals.values():
        kinds.setdefault(journal["kind"], Counter({"journals": 0})).update(
            {"journals": 1, **journal["answers"]}
        )
    return {
        "journals": len(journals),
        "sessions": sum(sum(journal["answers"].values()) for journal in journals.values()),
        "behind_in_silence": [fault for journal in journals.values() for fault in journal["faults"]],
        "kinds": {kind: dict(sorted(counts.items())) for kind, counts in sorted(kinds.items())},
    }


async def look_at_all(
    options: argparse.Namespace, journals: dict[str, dict[str, Any]], save: Callable[[], None]
) -> None:
    """Damage the journals that were not looked at yet."""
    room = asyncio.Semaphore(options.at_once)

    async def look_at(half: str, number: int) -> None:
        async with room:
            seen = await HALVES[half](f"{options.seed} {half} {number}")
        journals[half][str(number)] = {
            "kind": seen.kind,
            "answers": dict(seen.answers),
            "faults": seen.faults,
        }
        save()
        if len(journals[half]) % 20 == 0 or seen.faults:
            print(f"{half}: {len(journals[half])} journals", *seen.faults, flush=True)

    async with asyncio.TaskGroup() as group:
        for half in options.halves:
            for number in range(options.journals):
                if str(number) not in journals[half]:
                    group.create_task(look_at(half, number))


def main() -> None:
    """Run it from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--journals", type=int, default=200, help="Of each half.")
    parser.add_argument("--halves", nargs="+", choices=sorted(HALVES), default=sorted(HALVES))
    parser.add_argument(
        "--at-once", type=int, default=16, help="Journals at the same time: most of it is waiting."
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="Where progress and results are kept.")
    options = parser.parse_args()
    # Servers tell of each damage, which is what is wanted of them.
    logging.disable(logging.ERROR)
    journals = load(options.out, options.seed)
    begun = time.monotonic()
    about = {
        "command": "python " + " ".join(sys.argv),
        "commit": revision(short=True),
        "cores": os.cpu_count(),
    }

    def save() -> None:
        if options.out is not None:
            result = {half: summary(found) for half, found in journals.items()}
            content = {"about": about, "seed": options.seed, "result": result, "journals": journals}
            fresh = options.out.with_suffix(".new")
            fresh.write_text(json.dumps(content) + "\n")
            fresh.replace(options.out)

    asyncio.run(look_at_all(options, journals, save))
    result = {half: summary(found) for half, found in journals.items()}
    print(json.dumps(result, indent=1, ensure_ascii=False))
    print(f"{time.monotonic() - begun:.0f} s")
    if any(found["behind_in_silence"] for found in result.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
