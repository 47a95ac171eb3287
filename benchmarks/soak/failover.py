"""Everything that can die dies: python benchmarks/soak/failover.py [--minutes 20] [--kills 60] [--out FILE].

Three gateways stand before four nodes and share a journal, which fails over (`--failovers 2`) to a replica that lags:
the steps of the last seconds are not in it, and a node dies with each fail-over. Gateways, nodes, their I/O processes
and the workers of environments are killed (SIGKILL) at random meanwhile. A proxy gives each request to a gateway at
random. Episodes have 10 kB to 10 MB of actions.

Each player compares each answer with a model of the environment that shares no line with it. A session may end as
`lost` only if it was used while the replica lagged; everything else that is not the model's answer, or has no code of
the protocol, is a failure. With `--replicas 1` gateways answer only what the replica has, and no session may be lost at
all. `--minutes 1 --kills 4 --failovers 1` is a first look.

What was played is kept in FILE as it goes. Started again with the same FILE, the run goes on where it was.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
from failover_fleet import FailoverFleet
from failover_players import IDLE_S, Player
from failover_progress import FailoverProgress
from ledger_model import LARGEST
from run import left_at
from spreading_proxy import SpreadingProxy

from rollgym.clients.client.client import EnvClient
from rollgym.clients.measuring.revision import revision

SAVE_EVERY_S = 10.0
_FAILURES = ("lost", "different", "untyped", "mended_by_client", "left_at_nodes")


async def run(
    options: argparse.Namespace, progress: FailoverProgress, about: dict[str, Any]
) -> dict[str, Any]:
    """Start everything, let it be played with, and give what has happened."""
    with tempfile.TemporaryDirectory() as place:
        fleet = await asyncio.to_thread(FailoverFleet, place, progress, options.replicas)
        try:
            await fleet.whole()
            ports = [gateway.port for gateway in fleet.gateways]
            async with SpreadingProxy(ports, random.Random(progress.seed + 1)) as proxy:
                await play_all(options, progress, about, fleet, proxy)
            await fleet.whole()
            left = sum(await left_at(fleet.nodes, options.settle_s))
            # What was closed while the replica lagged is there again, until its idle time-out.
            progress.left_at_nodes = left if options.settle_s > IDLE_S else 0
        finally:
            fleet.stop()
    result = {name: value for name, value in asdict(progress).items() if name != "played"}
    return {**result, "episodes": len(progress.played)}


async def play_all(
    options: argparse.Namespace,
    progress: FailoverProgress,
    about: dict[str, Any],
    fleet: FailoverFleet,
    proxy: SpreadingProxy,
) -> None:
    """Play until the time is over, under fire."""
    begun = time.monotonic() - progress.seconds
    until = begun + 60 * options.minutes
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with (
        EnvClient(proxy.url, reconnect_timeout_s=120) as client,
        httpx.AsyncClient(base_url=proxy.url, timeout=90, limits=limits) as http,
    ):
        players = [
            Player(
                number,
                client,
                http,
                progress,
                longest_pause_s=options.pause,
                largest=options.largest,
            )
            for number in range(options.players)
        ]
        tasks = [asyncio.create_task(each.play_until(until)) for each in players]
        tasks.append(asyncio.create_task(fleet.fire(options, progress)))
        try:
            while not all(each.done() for each in tasks):
                done, _ = await asyncio.wait(tasks, timeout=SAVE_EVERY_S, return_when=asyncio.FIRST_EXCEPTION)
                for each in done:
                    each.result()
                progress.seconds = min(time.monotonic() - begun, 60 * options.minutes)
                progress.save(options.out, about)
                print(row(progress), flush=True)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def row(progress: FailoverProgress) -> str:
    """One line on how it goes."""
    return (
        f"minute {progress.seconds / 60:.1f}: {len(progress.played)} episodes, {progress.steps} steps, "
        f"{progress.sent_bytes / 1e6:.0f} MB, kills {progress.kills}, "
        f"lost by fail-over {progress.lost_by_failover}+{progress.restored_by_client}, "
        f"lost {len(progress.lost)}, different {len(progress.different)}, untyped {len(progress.untyped)}"
    )


def main() -> None:
    """Run it from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--kills", type=int, default=60, help="Of everything but the journal, in all.")
    parser.add_argument("--failovers", type=int, default=2, help="Of the journal.")
    parser.add_argument(
        "--replicas",
        type=int,
        choices=(0, 1),
        default=0,
        help="How many replicas of the journal have to confirm what is answered.",
    )
    parser.add_argument("--pause", type=float, default=0.6, help="Players think so long at most, in seconds.")
    parser.add_argument("--players", type=int, default=16)
    parser.add_argument("--largest", type=int, default=LARGEST, help="Bytes that no episode passes.")
    parser.add_argument(
        "--settle-s",
        type=float,
        default=IDLE_S + 30,
        help="How long nodes may take to have no session left; less than an idle time-out: not looked at.",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="Where progress and results are kept.")
    options = parser.parse_args()
    options.journal_kills = 0
    # Servers in groups of their own are ended by this program, also where it is told to stop.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    commit = revision(short=True)
    about = {"about": {"command": "python " + " ".join(sys.argv), "commit": commit, "cores": os.cpu_count()}}
    progress = FailoverProgress.load(options.out, options.seed)
    result = asyncio.run(run(options, progress, about))
    print(json.dumps(result, indent=1))
    progress.save(options.out, {**about, "result": result})
    if any(result[name] for name in _FAILURES):
        sys.exit(1)


if __name__ == "__main__":
    main()
