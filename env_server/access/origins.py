"""Which web pages may talk to the server: a browser sends the requests of any page, even of a foreign site."""

import ipaddress
from collections.abc import Iterable, Mapping
from urllib.parse import SplitResult, urlsplit

from rollgym.clients.protocol.errors import ProblemError

_DEFAULT_PORTS = {"http": 80, "https": 443}


class Origins:
    """Refuses requests that a page of another site makes through a browser.

    A browser names the requesting page in `Origin`; other programs send no such header and are not affected. If no
    tokens are set, a page could also point its own name at the address of this machine, so that the browser takes page
    and server for one site (DNS rebinding): `Host` must then be a name that no other site can use.

    Args:
        allowed: The origins of pages that may talk to the server beside its own, such as `https://lab.example`.
        loopback_only: Whether the server is open to all users of this machine, and to no other machine.
    """

    def __init__(self, allowed: Iterable[str], *, loopback_only: bool) -> None:
        self._allowed = {_site(urlsplit(origin)) for origin in allowed}
        self._names = {host for _, host, _ in self._allowed}
        self._loopback_only = loopback_only

    def check(self, headers: Mapping[str, str]) -> None:
        """Refuse a request or handshake with these headers, if a page has no business to make it.

        Raises:
            ProblemError: `forbidden`.
        """
        host = headers.get("host")
        if self._loopback_only and host is not None:
            self._check_host(host)
        origin = headers.get("origin")
        if origin is not None:
            self._check_origin(origin, host)

    def _check_host(self, host: str) -> None:
        name = _split(f"//{host}").hostname
        if name is None or not (name in self._names or _is_local(name)):
            raise ProblemError(
                "forbidden",
                f"this server has no tokens, so it answers to local names such as localhost only, not to "
                f"{host[:200]!r}; the operator can name the page's address in allowed_origins, or set token_file",
            )

    def _check_origin(self, origin: str, host: str | None) -> None:
        site = _site(_split(origin))
        if site in self._allowed:
            return
        scheme, name, port = site
        # Behind a proxy that ends TLS the server does not know its own scheme, so the page's own counts.
        own = _site(_split(f"{scheme}://{host or ''}"))
        if not name or own != (scheme, name, port):
            raise ProblemError(
                "forbidden",
                f"pages of {origin[:200]} may not use this server; the operator can name them in allowed_origins",
            )


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return urlsplit("")
    return parts


def _site(parts: SplitResult) -> tuple[str, str, int | None]:
    return parts.scheme, parts.hostname or "", parts.port or _DEFAULT_PORTS.get(parts.scheme)


def _is_local(name: str) -> bool:
    """Whether no one on the Internet can give this name an address: a loopback address, or a name without a dot."""
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return bool(name) and "." not in name
