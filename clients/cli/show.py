"""`roll-env show`: the actions, observations, rewards and kwargs of an environment."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping
from typing import Any

import orjson
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from rollgym.clients.cli.arguments import CONNECT_TIMEOUT_S, add_server_arguments, server_url
from rollgym.clients.client.answers import reading
from rollgym.clients.client.client import EnvClient
from rollgym.clients.protocol.messages import EnvInfo
from rollgym.clients.protocol.schema_words import wanted

_TOLD = ("observation", "actions", "reward")


def add_parser(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("show", help="show what an environment is and which kwargs it has")
    parser.add_argument("env_id", help="Which environment.")
    add_server_arguments(parser)
    parser.add_argument("--json", action="store_true", help="Print everything that is known, as JSON.")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print one entry of the catalog."""
    with server_url(options) as url:
        env = asyncio.run(_fetch(url, options.token, options.env_id))
    if options.json:
        print(orjson.dumps(env.model_dump(), option=orjson.OPT_INDENT_2).decode())
    else:
        with reading("envs"):
            _print(env, Console(markup=False, emoji=False, highlight=False))
    return 0


async def _fetch(url: str, token: str | None, env_id: str) -> EnvInfo:
    async with EnvClient(url, token=token, connect_timeout_s=CONNECT_TIMEOUT_S) as client:
        return await client.env(env_id)


def _print(env: EnvInfo, console: Console) -> None:
    # An author's text is not markup.
    console.print(
        Text(f"{env.env_id}  {env.kind}, version {env.version}, runs {env.isolation}", style="bold")
    )
    console.print(Text(env.description))
    for name in _TOLD:
        if isinstance(text := env.metadata.get(name), str):
            console.print(Text.assemble((f"{name}: ", "bold"), text))
    steps = "no limit" if env.max_episode_steps is None else f"{env.max_episode_steps} steps"
    console.print(Text.assemble(("longest episode: ", "bold"), steps))
    properties = env.kwargs_schema.get("properties", {})
    console.print(Text("\nkwargs (--kwarg NAME=VALUE)" if properties else "\nno kwargs", style="bold"))
    for name, schema in properties.items():
        _print_kwarg(name, schema, console)


def _print_kwarg(name: str, schema: Mapping[str, Any], console: Console) -> None:
    default = f" = {orjson.dumps(schema['default']).decode()}" if "default" in schema else ""
    console.print(Text.assemble("  ", (name, "bold"), f"{default}  ({wanted(schema, none='null')})"))
    if description := schema.get("description"):
        console.print(Padding(Text(str(description)), (0, 0, 0, 6), expand=False))
