"""Sends bad frames to a server for as long as asked, and writes down what came back.

python benchmarks/security/frames.py --messages 40000 --seed 1 --output benchmarks/results/frames.json
"""

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from rollgym.clients.measuring.revision import revision
from tests.env_server.http.test_frames import ENV_IDS, LIMITS, SERVED, as_it_was
from tests.support.bad_frames import Fuzz, resident_mib
from tests.support.wire import Server

_ROUND = 2000


async def measure(messages: int, seed: int) -> dict[str, Any]:
    """Send messages in rounds; after each, the server must be as it was."""
    began = time.monotonic()
    with Server(*SERVED, *LIMITS) as server:
        fuzz = Fuzz(server, seed, ENV_IDS)
        memory = []
        while fuzz.sent < messages:
            await fuzz.run(_ROUND)
            await as_it_was(server)
            memory.append(round(resident_mib(server.process.pid), 1))
    return {
        "messages": fuzz.sent,
        "sockets": fuzz.sockets,
        "answers": dict(fuzz.codes.most_common()),
        "resident_mib_after_each_round": memory,
        "messages_a_round": _ROUND,
        "seconds": round(time.monotonic() - began, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--messages", type=int, default=40_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    commit = revision(short=True)
    result = {
        "command": f"python benchmarks/security/frames.py --messages {options.messages} --seed {options.seed}",
        "commit": commit,
        **asyncio.run(measure(options.messages, options.seed)),
    }
    text = json.dumps(result, indent=1)
    print(text)
    if options.output is not None:
        options.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
