"""`roll-env verify`: score one response of a file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import orjson

from rollgym.clients.checks.target import CheckTarget, TargetError
from rollgym.clients.cli.arguments import (
    CONNECT_TIMEOUT_S,
    UsageError,
    add_kwargs_argument,
    add_token_argument,
    checked_url,
    parse_kwargs,
)
from rollgym.clients.client.verifier import RemoteVerifier
from rollgym.clients.protocol.json_text import read_json
from rollgym.user_paths import user_path


def add_parser(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("verify", help="score a response with a verifier")
    parser.add_argument("env_id", metavar="ENV", help="`module:Class`, or an id such as CodeTests-v0.")
    parser.add_argument(
        "file",
        type=user_path,
        metavar="FILE",
        help='JSON: {"response": ..., ...task fields}; `-` reads standard input.',
    )
    parser.add_argument("--url", help="A running server that scores; without it, the verifier runs here.")
    add_token_argument(parser)
    add_kwargs_argument(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Score the response and print the verdict as a line of JSON; the exit code is 1 if it could not be scored."""
    item = _item(options.file)
    kwargs = parse_kwargs(options.kwarg)
    if options.url is None:
        verdict = _score_here(options.env_id, kwargs, item)
    elif kwargs:
        raise UsageError("--kwarg is for a verifier that runs here; a server has its own")
    else:
        with RemoteVerifier(
            checked_url(options.url), options.env_id, token=options.token, connect_timeout_s=CONNECT_TIMEOUT_S
        ) as verifier:
            scored = verifier.score([item])[0]
        verdict = {"score": scored.score, "outcome": scored.outcome, "detail": scored.detail}
    print(orjson.dumps(verdict).decode(), flush=True)
    return 1 if verdict["outcome"] in ("error", "timeout") else 0


def _item(name: Path) -> dict[str, Any]:
    try:
        text = sys.stdin.buffer.read() if name == Path("-") else name.read_bytes()
        item = read_json(text)
    except OSError as error:
        raise UsageError(f"{name} cannot be read: {error.strerror}") from None
    except orjson.JSONDecodeError as error:
        raise UsageError(f"{name} is no JSON: {error}") from None
    if not isinstance(item, dict) or not isinstance(item.get("response"), str):
        raise UsageError(f"{name} must hold one JSON object with a field 'response' that is text")
    return item


def _score_here(env_id: str, kwargs: dict[str, Any], item: dict[str, Any]) -> dict[str, Any]:
    try:
        environment = CheckTarget(env_id, kwargs).build()
    except (TargetError, TypeError, ValueError) as error:
        raise UsageError(str(error)) from error
    verifier: Any = environment.unwrapped
    if not hasattr(verifier, "score"):
        raise UsageError(f"{env_id} is no verifier: it has no method `score`")
    response = item.pop("response")
    try:
        verdict = verifier.score(response, item)
    except Exception as error:  # noqa: BLE001 - the boundary to a verifier's own code
        return {"score": 0.0, "outcome": "error", "detail": f"{type(error).__name__}: {error}"}
    finally:
        environment.close()
    return {"score": verdict.score, "outcome": verdict.outcome, "detail": verdict.detail}
