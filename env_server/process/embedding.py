"""A server within a program that has an event loop of its own: a debugger can reach its environments' code."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from rollgym.env_server.access.tokens import Tokens
from rollgym.env_server.catalog.catalog import Catalog
from rollgym.env_server.catalog.named_entries import named_class
from rollgym.env_server.common.io_process import ProcessRank
from rollgym.env_server.common.settings import ConfigurationError, Settings
from rollgym.env_server.http.transport.serving import EmbeddedServer, http_config
from rollgym.env_server.operations.services import Services
from rollgym.env_server.process.app import App
from rollgym.env_server.process.listening import bind, url_of

__all__ = ["ConfigurationError", "serve_here"]

_IDLE_S = 86400.0
"""A session survives an hour at a breakpoint."""


@asynccontextmanager
async def serve_here(environments: Sequence[str], *, allow_expert: bool = False) -> AsyncIterator[str]:
    """Serve on a free loopback port, in this process and its running event loop, while the context is open.

    Nothing of the process is changed: no signal handlers, no logging, no other event loop.

    Args:
        environments: The environments to serve beside the built-in ones, as `module:Class` or `name=module:Class`. They
            run in the event loop's thread, regardless of their declarations.
        allow_expert: Whether clients may ask environments for expert actions.

    Yields:
        The server's URL.

    Raises:
        ConfigurationError: If an environment cannot be imported or made.
    """
    settings = Settings(
        port=0,
        workers=1,
        env=tuple(environments),
        isolation={named_class(text)[0]: "inline" for text in environments},
        allow_expert=allow_expert,
        idle_timeout_s=_IDLE_S,
    )
    services = Services(settings, ProcessRank(), Tokens.load(None), Catalog.load(settings))
    listening = bind(settings.host, settings.port)
    server = EmbeddedServer(http_config(App(services), settings, services.admissions))
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        await services.start()
        yield url_of(settings.host, listening)
    finally:
        server.should_exit = True
        await serving
        await services.stop()
