"""`roll-env list`: the environments of a server."""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

import orjson
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rollgym.clients.cli.arguments import CONNECT_TIMEOUT_S, add_server_arguments, server_url
from rollgym.clients.client.client import EnvClient
from rollgym.clients.protocol.messages import EnvInfo

_LEAST_DESCRIPTION = 20
_EMPTY_FLEET = """\
no environments yet: this is a gateway, and no server has registered with it.
Nodes that are starting register within seconds; ask again. To start one:
  roll-serve --port 0 --register {url}
"""


def add_parser(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("list", help="show the environments that a server offers")
    add_server_arguments(parser)
    parser.add_argument("--kind", choices=("episodic", "stateless"), help="Only these.")
    parser.add_argument("--json", action="store_true", help="Print everything that is known, as JSON.")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the catalog of environments."""
    with server_url(options) as url:
        envs, is_gateway = asyncio.run(_fetch(url, options.token))
    chosen = [env for env in envs if options.kind in (None, env.kind)]
    if options.json:
        print(orjson.dumps([env.model_dump() for env in chosen], option=orjson.OPT_INDENT_2).decode())
    elif not envs and is_gateway:
        print(_EMPTY_FLEET.format(url=url), end="")
    else:
        console = Console(markup=False, emoji=False)
        console.print(_table(chosen, console.width))
    return 0


async def _fetch(url: str, token: str | None) -> tuple[list[EnvInfo], bool]:
    """Fetch the environments of a server, and whether it is a gateway."""
    async with EnvClient(url, token=token, connect_timeout_s=CONNECT_TIMEOUT_S) as client:
        return await client.envs(), (await client.info()).role == "gateway"


def _table(envs: list[EnvInfo], room: int) -> Table:
    rows = [
        (
            env.env_id,
            env.version,
            env.kind,
            env.isolation if env.origin == "local" else f"registered ({env.replicas})",
            "yes" if env.deterministic else "no",
            str(env.max_episode_steps or "-"),
        )
        for env in envs
    ]
    headings = ("id", "version", "kind", "runs", "deterministic", "steps")
    table = Table(box=None, pad_edge=False)
    for heading, *cells in zip(headings, *rows, strict=True):
        width = max(map(len, (heading, *cells)))
        table.add_column(heading, width=width, no_wrap=True)
        room -= width + 2
    # One line each, as far as there is room; --json has all of it.
    if room >= _LEAST_DESCRIPTION:
        table.add_column("description", width=room, no_wrap=True, overflow="ellipsis")
    for env, row in zip(envs, rows, strict=True):
        # An author's text is not markup.
        table.add_row(*row, *([Text(env.description)] if room >= _LEAST_DESCRIPTION else []))
    return table
