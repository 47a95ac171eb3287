"""Addresses of servers, as users write them: invalid ones are refused before anything is sent there."""

from collections.abc import Collection
from urllib.parse import SplitResult, urlsplit

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
