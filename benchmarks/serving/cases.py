"""Contenders taking turns: which are compared here, and every case of theirs once a round."""

import argparse
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from contextlib import ExitStack
from pathlib import Path

import processes
import rounds
import uvloop
from contenders import Contender
from load import run_load
from other_servers import install
from rounds import Rows, progress


def parser(description: str | None) -> argparse.ArgumentParser:
    """The arguments of a comparison with peers."""
    made = rounds.parser(description, rounds=3, seconds=2.0)
    made.add_argument("--peers", type=Path, help="folder of the peers' virtual environments")
    made.add_argument("--python", action="append", default=[], help="an interpreter to try for peers")
    return made


def interpreters(options: argparse.Namespace) -> dict[str, str]:
    """The interpreters of peers, which are installed first where they are missing; none without a folder for them."""
    if options.peers is None:
        return {}
    install.install(options.peers, options.python)
    return install.interpreters(options.peers)


def placeholders(options: argparse.Namespace) -> dict[str, str]:
    """What stands in the recorded command in place of this machine's paths."""
    return {str(options.peers): "PEERS", **dict.fromkeys(options.python, "PYTHON")}


def choose(
    contenders: Iterable[Contender], options: argparse.Namespace, pythons: dict[str, str]
) -> list[Contender]:
    """Those that are asked for and can be started."""
    return [
        each
        for each in contenders
        if (each.peer is None or each.peer in pythons) and re.search(options.only, each.label)
    ]


def measure(
    chosen: Iterable[Contender],
    options: argparse.Namespace,
    pythons: dict[str, str],
    *,
    sizes: Collection[int] | None = None,
    first: Callable[[Contender, processes.Server], None] | None = None,
) -> Rows:
    """Every case once a round; each round has servers of its own, since equal processes differ by some percent.

    Args:
        chosen: Who is measured.
        options: Rounds, and seconds of each case.
        pythons: Interpreters of peers.
        sizes: Numbers of sessions to measure; all of a contender's where it is None.
        first: Called with each contender and its server before it is measured for the first time.
    """
    rows: Rows = defaultdict(list)
    for number in range(options.rounds):
        with ExitStack() as stack:
            servers = {
                each.server: stack.enter_context(processes.server((each.python(pythons), *each.server)))
                for each in {each.server: each for each in chosen}.values()
            }
            for each in chosen:
                server = servers[each.server]
                if first is not None and number == 0:
                    first(each, server)
                for sessions in each.sizes:
                    if sizes is None or sessions in sizes:
                        load = run_load(
                            *(server.port, server.pid, each.kind, each.groups(sessions)),
                            seconds=options.seconds,
                        )
                        found = uvloop.run(load).summary() | {"load_average": processes.load_average()}
                        rows[each.label, sessions].append(found)
                        progress(f"round {number + 1}: {each.label}, {sessions}: {found}")
    return rows
