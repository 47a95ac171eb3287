"""The addresses that a gateway may connect to: those of registered servers are checked once, and then pinned."""

import asyncio
import ipaddress
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import urlsplit, urlunsplit

import httpx

from rollgym.clients.protocol.errors import ProblemError
from rollgym.env_server.common.requests import invalid
from rollgym.env_server.common.settings import ConfigurationError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_PORTS = {"http": 80, "https": 443}
# Private networks: neither global nor loopback addresses, whose machines must not be exposed.
_LOOPBACK = (ipaddress.ip_network("127.0.0.0/8"), ipaddress.ip_network("::1/128"))
_PRIVATE = tuple(
    ipaddress.ip_network(text)
    for text in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "fc00::/7")
)
_NAMED = {"loopback": _LOOPBACK, "private": _PRIVATE}
# IPv6 addresses with an embedded IPv4 address, which a translator on the path would connect to.
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_THIS_NETWORK = ipaddress.IPv4Network("0.0.0.0/8")
_LOCAL_NAT64 = ipaddress.IPv6Network("64:ff9b:1::/48")


@dataclass(frozen=True, slots=True)
class Target:
    """A registered server: how it is called, and the address that was checked.

    Attributes:
        url: Its base URL, without a slash at the end.
        host: The name or address in the URL; for the Host header and for TLS.
        port: Its port.
        address: The address that connections go to.
    """

    url: str
    host: str
    port: int
    address: str

    @property
    def secure(self) -> bool:
        """Whether it is spoken to over TLS."""
        return self.url.startswith("https:")


class TargetLimits(NamedTuple):
    """The limits for replies of a target and for connections to it.

    Attributes:
        max_reply_bytes: Larger replies are refused.
        max_connections: How many are in use at one time.
    """

    max_reply_bytes: int
    max_connections: int


class TargetRules:
    """The networks that registered servers may be in.

    Public addresses are always allowed. Loopback and private ones are allowed if the operator says so; link-local ones
    (such as a cloud's metadata service), multicast and reserved ones never.

    Args:
        allowed: `loopback`, `private`, or networks such as `10.1.0.0/16`.

    Raises:
        ConfigurationError: If one is none of these.
    """

    def __init__(self, allowed: Iterable[str]) -> None:
        networks: list[Network] = []
        for text in allowed:
            if text in _NAMED:
                networks.extend(_NAMED[text])
                continue
            try:
                networks.append(ipaddress.ip_network(text))
            except ValueError as error:
                raise ConfigurationError(
                    f"allow_network names {text!r}, which is neither loopback, private nor a network: {error}"
                ) from error
        self._allowed = tuple(networks)

    def refusal(self, address: Address) -> str | None:
        """Why an address may not be connected to, or None if it may."""
        carried = _carried(address)
        if carried:
            return next(filter(None, map(self.refusal, carried)), None)
        if address.is_link_local or address.is_multicast or address.is_unspecified:
            return f"{address} is a link-local, multicast or unspecified address, which is never allowed"
        if any(address in network for network in self._allowed if network.version == address.version):
            return None
        if address.is_global and not address.is_reserved:
            return None
        kind = "loopback" if address.is_loopback else "private"
        return (
            f"{address} is not public; the gateway's setting allow_network ({kind}, or a network) allows it"
        )

    async def check(self, url: str) -> Target:
        """Check a URL and return its target.

        Raises:
            ProblemError: `invalid_request` if it is not a base URL, `forbidden` if its address is not allowed.
        """
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise invalid("url", str(error)) from error
        if parts.scheme not in _PORTS or not parts.hostname:
            raise invalid("url", "a base URL is needed, such as https://envs.example.org:8000")
        if parts.query or parts.fragment or parts.username is not None or parts.password is not None:
            raise invalid("url", "a base URL has no query, fragment, name or password; give `token` instead")
        try:
            httpx.URL(url)
        except httpx.InvalidURL as error:
            # Resolvers take names that are none on the Web.
            raise invalid("url", f"the host {parts.hostname[:100]!r} cannot be asked: {error}") from error
        port = port or _PORTS[parts.scheme]
        addresses = await _resolve(parts.hostname, port)
        for address in addresses:
            # One forbidden address is enough: the name may resolve to it next time.
            reason = self.refusal(address)
            if reason is not None:
                raise ProblemError("forbidden", f"{url} cannot be registered: {reason}")
        base = urlunsplit((parts.scheme, parts.netloc, parts.path.rstrip("/"), "", ""))
        return Target(base, parts.hostname, port, str(addresses[0]))


async def _resolve(host: str, port: int) -> list[Address]:
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise invalid("url", f"the host {host!r} cannot be found: {error}") from error
    return [ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in found]


def _carried(address: Address) -> list[ipaddress.IPv4Address]:
    """The IPv4 addresses within an IPv6 one that it may stand for."""
    if not isinstance(address, ipaddress.IPv6Address):
        return []
    if address.ipv4_mapped is not None:
        return [address.ipv4_mapped]
    if address.sixtofour is not None:
        return [address.sixtofour]
    if address.teredo is not None:
        return [address.teredo[1]]
    if address in _NAT64:
        return [ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)]
    return _translated(address) if address in _LOCAL_NAT64 else []


def _translated(address: ipaddress.IPv6Address) -> list[ipaddress.IPv4Address]:
    """The IPv4 addresses that a NAT64 translator may derive, for all lengths of its prefix (RFC 6052, 2.2)."""
    # The ninth byte does not belong to the IPv4 address.
    content = address.packed[:8] + address.packed[9:]
    found = [ipaddress.IPv4Address(content[at : at + 4]) for at in (6, 7, 8)]
    found.append(ipaddress.IPv4Address(address.packed[12:]))
    # For another prefix length the bytes may be zeros, which is not a host's address.
    return [each for each in found if each not in _THIS_NETWORK] or found[-1:]
