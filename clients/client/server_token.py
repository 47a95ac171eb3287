"""The token of a server: the one that is given, or that of the environment variable `ROLLGYM_TOKEN`."""

from __future__ import annotations

import os

from rollgym.clients.protocol.errors import ProblemError

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
    return ProblemError(problem.code, f"{what}: {remedy}", **problem.extra)
