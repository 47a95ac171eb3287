"""One I/O process: from its settings to its exit code."""

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable

from rollgym.env_server.access.tokens import Tokens
from rollgym.env_server.catalog.catalog import Catalog
from rollgym.env_server.common.io_process import ProcessRank
from rollgym.env_server.common.settings import ConfigurationError, Settings
from rollgym.env_server.gateway.announcer import Announcer
from rollgym.env_server.http.transport.serving import DrainingServer, http_config
from rollgym.env_server.operations.services import Services
from rollgym.env_server.process.app import App
from rollgym.env_server.process.listening import url_of
from rollgym.env_server.telemetry.logs import configure_logs, describe_records
from rollgym.env_server.telemetry.loop_watch import StandstillWatch
from rollgym.sandbox.core.naming import VARIABLE as SANDBOX_VARIABLE

_log = logging.getLogger(__name__)


def run_process(
    settings: Settings, rank: ProcessRank, listening: socket.socket, announce: Callable[[], None]
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
    standard_output = sys.stdout

    def announce_there() -> None:
        with contextlib.redirect_stdout(standard_output):
            announce()

    # Readers of standard output expect the announcement alone, and no output of environments or Ray's nodes.
    with (
        contextlib.redirect_stdout(sys.stderr),
        asyncio.Runner(loop_factory=_loop_factory()) as runner,
    ):
        return runner.run(_serve(settings, rank, tokens, catalog, listening, announce_there))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    if sys.platform == "win32":
        return None
    import uvloop

    return uvloop.new_event_loop


async def _serve(
    settings: Settings,
    rank: ProcessRank,
    tokens: Tokens,
    catalog: Catalog,
    listening: socket.socket,
    announce: Callable[[], None],
) -> int:
    services = Services(settings, rank, tokens, catalog)
    describe_records(services.about)
    server = DrainingServer(http_config(App(services), settings, services.admissions), services.drain)
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
    # Objects from before the first session live as long as the process; garbage collections that scan them would delay
    # steps.
    gc.collect()
    gc.freeze()
    announce()
    with StandstillWatch(services.loop_watch):
        await serving
    await services.stop()
    return 0
