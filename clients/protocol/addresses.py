"""Addresses of servers, as users write them, and their tokens: invalid addresses are refused before anything is sent.

A token is the one that is given, or that of the environment variable `ROLLGYM_TOKEN`.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from urllib.parse import SplitResult, urlsplit

from rollgym.clients.protocol.errors import ProblemError

EXAMPLE = "http://127.0.0.1:8000"
_LONGEST_NAME = 253
"""Of a host, RFC 1035. Longer ones are not translated to be looked up, which takes seconds for a megabyte."""
_MOST_SHOWN = 100


def server_parts(url: str, schemes: Collection[str]) -> SplitResult:
    """Return the parts of a server's address.

    Args:
        url: The address.
        schemes: The accepted schemes.

    Raises:
        ValueError: If it is invalid: another scheme, no name, a name or a port that no network has, white space, or a
            lone surrogate, which is how the shell passes invalid UTF-8 on.
    """
    wrong = f"{_shown(url)} is not the address of a server, such as {EXAMPLE}"
    try:
        if " " in url or not url.isprintable():
            raise ValueError  # some of these urlsplit takes away without a word
        parts = urlsplit(url)
        host = parts.hostname or ""
        if len(host) > _LONGEST_NAME:
            raise ValueError
        host.encode("idna")  # as it is looked up: a label of it has 1 to 63 characters
    except ValueError:
        raise ValueError(wrong) from None
    if parts.scheme not in schemes or not host:
        raise ValueError(wrong)
    try:
        port = parts.port
    except ValueError:
        port = 0
    if port == 0:
        raise ValueError(f"{_shown(url)} has no port that there is: they go from 1 to 65535")
    return parts


def _shown(url: str) -> str:
    """Return enough of an address to recognize it, without its password."""
    user, at, rest = url.rpartition("@")
    text = f"...@{rest}" if at else user + rest
    return repr(text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]} ...")


TOKEN_VARIABLE = "ROLLGYM_TOKEN"
"""The environment variable that holds a server's token if none is given."""


def server_token(given: str | None) -> str | None:
    """Return the token for the server that a user has named.

    Args:
        given: The token that the user passed; an empty one is sent to no server, whatever the variable holds.
    """
    return (os.environ.get(TOKEN_VARIABLE) if given is None else given) or None


def explain_refusal(problem: ProblemError, token: str | None, option: str = "token=...") -> ProblemError:
    """Add to a server's refusal how to pass its token; return any other problem unchanged.

    Args:
        problem: The server's problem.
        token: The token that was sent.
        option: The option by which the user passes one.
    """
    if problem.code != "unauthorized":
        return problem
    what = "this server needs a token" if token is None else "the server does not know this token"
    remedy = f"pass its token as {option}, or set the environment variable {TOKEN_VARIABLE}"
    explained = ProblemError(problem.code, f"{what}: {remedy}", **problem.extra)
    for note in getattr(problem, "__notes__", ()):
        explained.add_note(note)
    return explained
