"""One I/O process: from its settings and its listening socket to its exit code."""

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence

from rollgym.env_server.access.tokens import Tokens
from rollgym.env_server.catalog.catalog import Catalog
from rollgym.env_server.common.io_process import ProcessRank
from rollgym.env_server.common.logs import configure_logs, describe_records
from rollgym.env_server.common.loop_watch import StandstillWatch
from rollgym.env_server.common.settings import ConfigurationError, ServerSettings
from rollgym.env_server.gateway.announcer import Announcer
from rollgym.env_server.http.transport.serving import DrainingServer, http_config
from rollgym.env_server.operations.services import Services
from rollgym.env_server.process.app import App
from rollgym.env_server.process.garbage import IdleCollections
from rollgym.env_server.protocols.face import Face
from rollgym.env_server.protocols.faces import served_faces
from rollgym.sandbox.core.kinds import VARIABLE as SANDBOX_VARIABLE

_BACKLOG = 4096
# A peer that vanished without a word is noticed by the kernel after about two minutes, while a client that is alive but
# busy (a language model thinks) is never disconnected: its kernel answers for it.
_KEEPALIVE_IDLE_S = 60
_KEEPALIVE_INTERVAL_S = 15
_KEEPALIVE_PROBES = 4
_log = logging.getLogger(__name__)


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
    except (OSError, UnicodeError) as error:
        # Not every text can be looked up as a name.
        taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        remedy = ": name another port, or 0 for one that is free" if taken else ""
        raise ConfigurationError(f"cannot listen on {host} port {port}: {error}{remedy}") from error
    return listening


def url_of(host: str, listening: socket.socket) -> str:
    """The URL under which a listening socket is reached."""
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{listening.getsockname()[1]}"


def run_process(
    settings: ServerSettings, rank: ProcessRank, listening: socket.socket, announce: Callable[[], None]
) -> int:
    """Serve on a listening socket until SIGTERM or SIGINT.

    Args:
        settings: The operator's settings.
        rank: Which of the server's I/O processes this is.
        listening: The socket to accept connections on.
        announce: Called once the process serves.

    Returns:
        The exit code.

    Raises:
        ConfigurationError: If the settings cannot be used.
    """
    if settings.sandbox is not None:
        # Environments read it there, in this process and in its children.
        os.environ[SANDBOX_VARIABLE] = settings.sandbox
    configure_logs(settings.log_level, settings.log_format, str(rank.index))
    if settings.token_file is None and settings.log_format == "json" and rank.index == 0:
        _log.warning("no tokens are configured, so only loopback is served")
    tokens = Tokens.load(settings.token_file)
    catalog = Catalog.load(settings)
    faces = served_faces(settings.face)
    standard_output = sys.stdout

    def announce_there() -> None:
        with contextlib.redirect_stdout(standard_output):
            announce()

    # Readers of standard output expect the announcement alone, and no output of environments or Ray's nodes.
    with (
        contextlib.redirect_stdout(sys.stderr),
        asyncio.Runner(loop_factory=_loop_factory()) as runner,
    ):
        return runner.run(_serve(settings, rank, tokens, catalog, faces, listening, announce_there))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    if sys.platform == "win32":
        return None
    import uvloop

    return uvloop.new_event_loop


async def _serve(
    settings: ServerSettings,
    rank: ProcessRank,
    tokens: Tokens,
    catalog: Catalog,
    faces: Sequence[Face],
    listening: socket.socket,
    announce: Callable[[], None],
) -> int:
    services = Services(settings, rank, tokens, catalog)
    describe_records(services.about)
    server = DrainingServer(http_config(App(services, faces), settings, services.admissions), services.drain)
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        if settings.token_file is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, services.reload_tokens)
        await services.start()
    except ConfigurationError:
        server.should_exit = True
        await serving
        await services.stop()
        raise
    announcer: Announcer | None = None
    if settings.register_with and rank.index == 0:
        url = url_of(settings.host, listening)
        announcer = Announcer(settings, url, [entry.env_id for entry in catalog], services.load)
        announcer.start()
        services.on_socket_dropped = announcer.socket_dropped
        server.on_drain = announcer.leave
    with IdleCollections(), StandstillWatch(services.loop_watch):
        announce()
        await serving
    await services.stop()
    return 0
