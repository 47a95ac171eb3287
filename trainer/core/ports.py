"""Ports to listen on later, once the program that listens there has started."""

import secrets
import socket
from contextlib import ExitStack, suppress
from pathlib import Path

OWN_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""The ports that Linux gives to who asks for any."""
_QUIET_PORTS = range(20_000, 30_000)
"""Above those that Ray gives its workers, below those that any system gives to who asks for any."""
_TRIES = 100


def free_ports(host: str, count: int) -> list[int]:
    """Return different free ports, to be taken later.

    They are none that the system may give to another process meanwhile, which asks for any port to listen on or to
    connect from.

    Args:
        host: The address to listen on; empty for all of IPv4's.
        count: How many.

    Raises:
        OSError: If the host is none of this machine.
    """
    quiet = quiet_ports(OWN_RANGE.read_text() if OWN_RANGE.exists() else "")
    # All are held until the last is chosen: no two are one.
    with ExitStack() as held:
        return [_free(held, host, quiet) for _ in range(count)]


def quiet_ports(own_range: str) -> range:
    """Return ports that the system does not give to a program that asks for any port.

    Args:
        own_range: The first and the last of those that it gives, as Linux writes them; empty if unknown.
    """
    first, last = map(int, own_range.split()) if own_range else (_QUIET_PORTS.stop, 65_535)
    below = range(_QUIET_PORTS.start, min(first, _QUIET_PORTS.stop))
    return below or range(max(last + 1, _QUIET_PORTS.start), 65_536)


def hold(held: ExitStack, host: str, port: int, *, alone: bool = False) -> int:
    """Hold a port until the stack is left, and return its number.

    Args:
        held: Keeps it.
        host: The address to listen on.
        port: Its number; 0 for any.
        alone: Refuse a port that was used a moment ago, or that others hold as we do.

    Raises:
        OSError: If it cannot be held.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    place = held.enter_context(socket.socket(family, socket.SOCK_STREAM))
    place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, not alone)
    place.bind((host, port))
    number: int = place.getsockname()[1]
    return number


def _free(held: ExitStack, host: str, quiet: range) -> int:
    """Hold a free port, of the quiet ones if there are any."""
    for _ in range(_TRIES if quiet else 0):
        with suppress(OSError):
            return hold(held, host, secrets.choice(quiet), alone=True)
    return hold(held, host, 0, alone=True)
