"""`roll-env audit`: a report card of an environment or a verifier."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from rollgym.clients.audit.card import Card, CardVerdict, print_card
from rollgym.clients.audit.runner import PARTS, run_audit
from rollgym.clients.audit.subject import AuditSettings, Budget
from rollgym.clients.cli.arguments import (
    CONNECT_TIMEOUT_S,
    PATIENCE_S,
    UsageError,
    add_kwargs_argument,
    add_server_arguments,
    parse_kwargs,
    read_number,
    read_seed,
    server_url,
    target_served_here,
)
from rollgym.clients.client.client import EnvClient
from rollgym.clients.measuring.metrics import (
    queued_by_metrics,
    queued_seconds,
    resident_by_metrics,
    resident_of_tree,
)
from rollgym.clients.process.local_server import LocalServer
from rollgym.clients.protocol.json_text import read_json
from rollgym.user_paths import user_path

# One worker, so that all sessions share a process and leaks between them show. The hash seeds differ, so that
# dependence on them shows as well.
_SERVER = ("--workers", "1", "--allow-expert", "--log-level", "error")
_HERE, _ELSEWHERE = {"PYTHONHASHSEED": "1"}, {"PYTHONHASHSEED": "4711"}


def add_parser(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("audit", help="write a report card of an environment or a verifier")
    parser.add_argument(
        "target", metavar="ENV", help="An id of the server's catalog, or `module:Class` (not with --url)."
    )
    add_server_arguments(parser)
    add_kwargs_argument(parser)
    parser.add_argument("--kwargs", metavar="JSON", help="The environment's kwargs as one JSON object.")
    parser.add_argument("--episodes", type=int, default=100, help="Episodes of each baseline (default 100).")
    parser.add_argument("--seed", type=read_seed, default=0, help="Of all that is drawn (default 0).")
    parser.add_argument(
        "--budget-s",
        type=read_number,
        default=60.0,
        help="How long it may take (default 60); what does not fit is left out.",
    )
    parser.add_argument(
        "--items",
        type=user_path,
        metavar="FILE",
        help="For a verifier: task fields, one JSON object a line, in place of the tasks that it draws.",
    )
    parser.add_argument("--json", type=user_path, metavar="FILE", help="Write the card as JSON, too.")
    parser.add_argument(
        "--fail-on",
        choices=("warning", "failed"),
        default="failed",
        help="The exit code is 1 from this verdict on (default failed).",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Audit, and print the card; the exit code is 1 if an entry is as bad as --fail-on says."""
    if options.episodes < 1 or options.budget_s <= 0:
        raise UsageError("--episodes and --budget-s must be positive")
    settings = AuditSettings(options.episodes, options.seed, options.budget_s, _items(options.items))
    kwargs = parse_kwargs(options.kwarg) | _object("--kwargs", options.kwargs)
    if options.url is not None:
        if ":" in options.target:
            raise UsageError("--url is a running server: name an id of its catalog")
        with server_url(options) as url:
            card = _audit(options, settings, url, options.target, kwargs, None, None)
    else:
        card = _audit_here(options, settings, kwargs)
    print_card(card, Console(highlight=False, emoji=False))
    if options.json is not None:
        options.json.write_bytes(orjson.dumps(card.as_dict(), option=orjson.OPT_INDENT_2) + b"\n")
    return 0 if card.passes(CardVerdict(options.fail_on)) else 1


def _audit_here(options: argparse.Namespace, settings: AuditSettings, kwargs: dict[str, Any]) -> Card:
    """Audit on a server that is started for it."""
    env_id, kwargs, served = target_served_here(options, kwargs)
    arguments = [*_SERVER, *served]
    with LocalServer(arguments, _HERE) as server:
        elsewhere = partial(_fresh_server, arguments)
        return _audit(options, settings, server.url, env_id, kwargs, server.process.pid, elsewhere)


def _audit(
    options: argparse.Namespace,
    settings: AuditSettings,
    url: str,
    env_id: str,
    kwargs: dict[str, Any],
    process_id: int | None,
    elsewhere: Any,
) -> Card:
    resident = (
        partial(resident_by_metrics, url, options.token)
        if process_id is None
        else partial(resident_of_tree, process_id)
    )
    queued = (
        partial(queued_by_metrics, url, options.token)
        if process_id is None
        else partial(queued_seconds, process_id)
    )

    async def audit() -> Card:
        async with _client(url, options.token) as client:
            with _progress() as progress:
                return await run_audit(
                    client,
                    env_id,
                    kwargs,
                    settings,
                    subject_name=options.target,
                    resident_bytes=resident,
                    elsewhere=elsewhere,
                    queued_seconds=queued,
                    progress=progress,
                )

    return asyncio.run(audit())


def _client(url: str, token: str | None) -> EnvClient:
    return EnvClient(url, token=token, connect_timeout_s=CONNECT_TIMEOUT_S, timeout_s=PATIENCE_S)


@asynccontextmanager
async def _fresh_server(arguments: Sequence[str]) -> AsyncIterator[EnvClient]:
    """Start the same server once more, with another hash seed."""
    server = LocalServer(arguments, _ELSEWHERE)
    await asyncio.to_thread(server.__enter__)
    try:
        async with _client(server.url, None) as client:
            yield client
    finally:
        await asyncio.to_thread(server.__exit__, None, None, None)


@contextmanager
def _progress() -> Iterator[Callable[[str, Budget], None]]:
    """Show the running part and the used budget on stderr, if that is a terminal."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(30),
        TimeElapsedColumn(),
        TextColumn("{task.fields[of]}"),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("starting", total=len(PARTS) + 1, of="")

        def show(part: str, budget: Budget) -> None:
            progress.update(task, advance=1, description=f"{part:12}", of=f"of at most {budget.seconds:g} s")

        yield show


def _items(path: Path | None) -> list[dict[str, Any]]:
    """Read task fields, one JSON object per line.

    Raises:
        UsageError: The file cannot be read, or a line is not an object.
    """
    if path is None:
        return []
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--items {path}: {error}") from error
    return [
        _object(f"--items {path}, line {number}", line)
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]


def _object(what: str, text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        found = read_json(text)
    except orjson.JSONDecodeError as error:
        raise UsageError(f"{what}: {error}") from error
    if not isinstance(found, dict):
        raise UsageError(f"{what} must be a JSON object, not {type(found).__name__}")
    return found
