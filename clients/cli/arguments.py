"""Arguments that several commands share: the server and the kwargs."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import orjson

from rollgym.clients.checks.target import CheckTarget, TargetError
from rollgym.clients.net.caller import bearer_headers
from rollgym.clients.net.connection import socket_url
from rollgym.clients.process.local_server import LocalServer
from rollgym.clients.protocol.addresses import TOKEN_VARIABLE, server_token
from rollgym.clients.protocol.json_text import read_json

CONNECT_TIMEOUT_S = 3.0
"""A person who mistyped an address wants to know soon."""


PATIENCE_S = 90.0
"""And one whose server is full does not wait for ever; a step may take a minute."""


_SEEDS = 2**53
_SEED_DIGITS = 40


class UsageError(Exception):
    """The command line asks for something that does not make sense."""


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the choice between a running server and one that the command starts."""
    parser.add_argument("--url", help="A running server; without it, one is started here for this command.")
    add_token_argument(parser)
    parser.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="MODULE:CLASS",
        help="For the server started here: serve this class too, as its name or `name=module:Class` (repeatable).",
    )
    parser.add_argument(
        "--gymnasium",
        action="append",
        default=[],
        metavar="ID",
        help="For the server started here: serve this Gymnasium id too (repeatable).",
    )
    parser.add_argument(
        "--gymnasium-text",
        action="append",
        default=[],
        metavar="ID",
        help="For the server started here: serve this Gymnasium id as text too (repeatable).",
    )


def add_token_argument(parser: argparse.ArgumentParser) -> None:
    """Add the token, which may as well stand in the environment variable."""
    parser.add_argument(
        "--token",
        type=_token,
        default=server_token(None),
        help=f"Bearer token; or set {TOKEN_VARIABLE}.",
    )


def _token(text: str) -> str:
    try:
        bearer_headers(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def read_seed(text: str) -> int:
    """Parse a seed that servers accept.

    Raises:
        argparse.ArgumentTypeError: It is not a whole number from 0 below 2**53.
    """
    if not (text.isascii() and text.isdecimal() and len(text) < _SEED_DIGITS and int(text) < _SEEDS):
        raise argparse.ArgumentTypeError(f"a seed is a whole number from 0 below 2**53, not {text[:40]!r}")
    return int(text)


def read_number(text: str) -> float:
    """Return a number.

    Raises:
        argparse.ArgumentTypeError: It is none, or not finite.
    """
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"a number is needed, not {text[:40]!r}")
    return number


def add_kwargs_argument(parser: argparse.ArgumentParser) -> None:
    """Add the option `--kwarg` for the environment's kwargs."""
    parser.add_argument(
        "--kwarg",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="A kwarg of the environment; the value is JSON, or text where it is not (repeatable).",
    )


def parse_kwargs(pairs: Sequence[str]) -> dict[str, Any]:
    """Read `key=value` pairs whose values are JSON, or else text.

    Raises:
        UsageError: A pair has no `=`.
    """
    kwargs: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key:
            raise UsageError(f"--kwarg {pair!r} is not KEY=VALUE")
        try:
            kwargs[key] = read_json(text)
        except orjson.JSONDecodeError:
            kwargs[key] = text
    return kwargs


def checked_url(url: str) -> str:
    """Return the address of a running server.

    Raises:
        UsageError: It is none.
    """
    try:
        socket_url(url)
    except ValueError as error:
        raise UsageError(str(error)) from error
    return url


@contextmanager
def server_url(options: argparse.Namespace) -> Iterator[str]:
    """Give the address of the chosen server, starting one if none was named.

    Raises:
        UsageError: The address is none, or both a running server and environments for a new one were named.
    """
    if options.url is not None:
        if options.env or options.gymnasium or options.gymnasium_text:
            raise UsageError(
                "--env, --gymnasium and --gymnasium-text are for a server started here, so they exclude --url"
            )
        yield checked_url(options.url)
        return
    with LocalServer(named_environments(options)) as server:
        yield server.url


def named_environments(options: argparse.Namespace) -> list[str]:
    """Return the arguments that make a server started here serve further environments beside its own."""
    arguments = [part for name in options.env for part in ("--env", name)]
    arguments += [part for name in options.gymnasium for part in ("--gymnasium", name)]
    arguments += [part for name in options.gymnasium_text for part in ("--gymnasium-text", name)]
    return arguments


def target_served_here(
    options: argparse.Namespace, kwargs: dict[str, Any]
) -> tuple[str, dict[str, Any], list[str]]:
    """Return what a command's target is called on a server started here, with a client's kwargs and the server's words.

    Raises:
        UsageError: The target names no environment.
    """
    arguments = named_environments(options)
    if ":" not in options.target:
        return options.target, kwargs, arguments
    target = CheckTarget(options.target, kwargs)
    try:
        return target.served_id, target.client_kwargs, [*arguments, *target.server_arguments()]
    except TargetError as error:
        raise UsageError(str(error)) from error
