"""The listening socket of a server."""

import socket

from rollgym.env_server.common.settings import ConfigurationError

_BACKLOG = 4096
# A peer that vanished without a word is noticed by the kernel after about two minutes, while a client that is alive but
# busy (a language model thinks) is never disconnected: its kernel answers for it.
_KEEPALIVE_IDLE_S = 60
_KEEPALIVE_INTERVAL_S = 15
_KEEPALIVE_PROBES = 4


def bind(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A listening socket; connections accepted from it inherit the keepalive options.

    Args:
        host: Address or name.
        port: Port; 0 lets the kernel choose.
        shared: Whether several processes listen on the port (SO_REUSEPORT).

    Raises:
        ConfigurationError: If the address cannot be used.
    """
    listening = reserve(host, port, shared=shared)
    listening.listen(_BACKLOG)
    return listening


def reserve(host: str, port: int, *, shared: bool) -> socket.socket:
    """A socket that is bound and does not listen: it keeps a port for the processes that share it.

    Raises:
        ConfigurationError: If the address cannot be used.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_KEEPIDLE"):
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_IDLE_S)
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_INTERVAL_S)
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEPALIVE_PROBES)
        listening.bind(address)
    except OSError as error:
        raise ConfigurationError(f"cannot listen on {host} port {port}: {error}") from error
    return listening


def url_of(host: str, listening: socket.socket) -> str:
    """The URL under which a listening socket is reached."""
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{listening.getsockname()[1]}"
