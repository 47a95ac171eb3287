"""Several gateways under fire: python benchmarks/soak/gateways.py [--minutes 20] [--kills 60] [--seed 0] [--out FILE].

Three gateways that share a journal stand before four nodes, and a proxy gives each request to one of them at random.
Gateways and nodes are killed (SIGKILL) at random, and with `--journal-kills` the journal's server, too. Players step
over plain HTTP, most of them with the place of the step, some without it, and others through our client's sockets,
which is not to restore anything. Every answer must be the one that follows the last one, afterwards the same episodes
are played in this process, where nothing disturbs them: all digests must be equal, and no copy of a session may be
left.

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
from gateway_fleet import Fleet
from gateway_players import IDLE_S, player, undisturbed
from progress import Progress
from run import left_at
from spreading_proxy import SpreadingProxy

from rollgym.clients.client.client import EnvClient
from rollgym.clients.measuring.revision import revision

SAVE_EVERY_S = 10.0


async def run(options: argparse.Namespace, progress: Progress, about: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as place:
        fleet = await asyncio.to_thread(Fleet, place)
        try:
            await fleet.whole()
            chance = random.Random(progress.seed + 1)
            ports = [gateway.port for gateway in fleet.gateways]
            async with SpreadingProxy(ports, chance) as proxy:
                await play_all(options, progress, about, fleet, proxy)
            for server in (*fleet.gateways, *fleet.nodes, fleet.journal):
                if server.process is None:
                    await asyncio.to_thread(server.start)
            await fleet.whole()
            left = sum(await left_at(fleet.nodes, options.settle_s))
            # Of a request that was repeated through another gateway, one session lasts until its idle time-out.
            progress.left_at_nodes = left if options.settle_s > IDLE_S else 0
        finally:
            fleet.stop()
    different = undisturbed(progress)
    return {
        **{name: value for name, value in asdict(progress).items() if name != "played"},
        "episodes": len(progress.played),
        "different": different,
    }


async def play_all(
    options: argparse.Namespace,
    progress: Progress,
    about: dict[str, Any],
    fleet: Fleet,
    proxy: SpreadingProxy,
) -> None:
    begun = time.monotonic() - progress.seconds
    until = begun + 60 * options.minutes
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with (
        EnvClient(proxy.url, reconnect_timeout_s=120) as client,
        httpx.AsyncClient(base_url=proxy.url, timeout=90, limits=limits) as http,
    ):
        playing = [
            asyncio.create_task(player(number, client, http, progress, until, options.pause))
            for number in range(options.players)
        ]
        firing = asyncio.create_task(fleet.fire(options, progress))
        try:
            while not all(each.done() for each in playing):
                await asyncio.wait(playing, timeout=SAVE_EVERY_S)
                progress.seconds = min(time.monotonic() - begun, 60 * options.minutes)
                progress.save(options.out, about)
                row = {"minute": round(progress.seconds / 60, 1), "episodes": len(progress.played)}
                print(
                    row,
                    "kills",
                    progress.kills,
                    "steps",
                    progress.steps,
                    "lost",
                    len(progress.lost),
                    flush=True,
                )
            await asyncio.gather(*playing, firing)
        finally:
            for task in (*playing, firing):
                task.cancel()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--kills", type=int, default=60, help="Of gateways and nodes, in all.")
    parser.add_argument("--journal-kills", type=int, default=0, help="Of the journal's server, beside those.")
    parser.add_argument("--pause", type=float, default=0.6, help="Players think so long at most, in seconds.")
    parser.add_argument("--players", type=int, default=32)
    parser.add_argument(
        "--settle-s",
        type=float,
        default=IDLE_S + 30,
        help="How long nodes may take to have no session left; less than an idle time-out: not looked at.",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="Where progress and results are kept.")
    options = parser.parse_args()
    # Servers in groups of their own are ended by this program, also where it is told to stop.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    commit = revision(short=True)
    about = {"about": {"command": "python " + " ".join(sys.argv), "commit": commit, "cores": os.cpu_count()}}
    progress = Progress.load(options.out, options.seed)
    result = asyncio.run(run(options, progress, about))
    print(json.dumps(result, indent=1))
    progress.save(options.out, {**about, "result": result})
    if result["lost"] or result["different"] or result["mended_by_client"] or result["left_at_nodes"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
