"""Addresses of servers, as users write them: what can never be asked for is refused before anything is sent there."""

from collections.abc import Collection
from urllib.parse import SplitResult, urlsplit

EXAMPLE = "http://127.0.0.1:8000"


def server_parts(url: str, schemes: Collection[str]) -> SplitResult:
    """Return the parts of a server's address.

    Args:
        url: The address.
        schemes: What may stand before its colon.

    Raises:
        ValueError: If it is none: another scheme, no name, a name or a port that no network has, or half a character,
            as the shell hands on what is no UTF-8.
    """
    wrong = f"{url!r} is not the address of a server, such as {EXAMPLE}"
    try:
        parts = urlsplit(url)
        url.encode()
        (parts.hostname or "").encode("idna")  # as it is looked up: a label of it has 1 to 63 characters
    except ValueError:
        raise ValueError(wrong) from None
    if parts.scheme not in schemes or not parts.hostname:
        raise ValueError(wrong)
    try:
        port = parts.port
    except ValueError:
        port = 0
    if port == 0:
        raise ValueError(f"{url!r} has no port that there is: they go from 1 to 65535")
    return parts
