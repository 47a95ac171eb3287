"""Serving an application with uvicorn: its settings, what it has to have, and how it ends."""

import asyncio
import inspect
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from functools import partial
from types import FrameType, MappingProxyType
from typing import Any, cast

import uvicorn
from uvicorn.server import ServerState

from rollgym.env_server.common.event_loop import Admissions
from rollgym.env_server.common.settings import ConfigurationError, ServerSettings
from rollgym.env_server.http.transport.connection import BoundedHttpProtocol, http_protocol
from rollgym.env_server.http.transport.write_coalescing import CoalescingProtocol

KNOWN = "uvicorn>=0.53,<0.55"
"""The releases that the tests have run with."""
_READ: Mapping[type[Any], tuple[str, ...]] = MappingProxyType(
    {
        BoundedHttpProtocol: (
            "connections",
            "cycle",
            "flow",
            "headers",
            "loop",
            "parser",
            "pipeline",
            "scope",
            "transport",
        ),
        CoalescingProtocol: (
            *("close_sent", "config", "conn", "curr_msg_data_type", "disconnected", "frames"),
            *("handshake_complete", "handshake_initiated", "loop", "queue", "read_paused"),
            *("send_receive_event_to_app", "transport", "writable"),
        ),
    }
)
"""The attributes of uvicorn's protocols that this package's read. Overridden methods are found by inspection."""

Message = MutableMapping[str, Any]
Application = Callable[
    [Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]
]
HARD_LIMIT_FACTOR = 8
"""A frame over the limit is answered `too_large`; one over this many times the limit ends the socket (code 1009)."""
_KEEP_ALIVE_S = 75
_CLOSE_GRACE_S = 5
_STANDS_STILL_S = 1.0
"""A loop that has not handled a signal for so many seconds is blocked by an inline environment."""
_log = logging.getLogger(__name__)


def _check_uvicorn(config: uvicorn.Config) -> None:
    """Check that the installed uvicorn has the overridden methods and the attributes that they read.

    Args:
        config: How HTTP and sockets will be served.

    Raises:
        ConfigurationError: It has not.
    """
    if lacking := [name for ours, reads in _READ.items() for name in _lacking(ours, reads, config)]:
        raise ConfigurationError(
            f"uvicorn {uvicorn.__version__} is not one that this release works with (it has no "
            f"{', '.join(lacking)}): pip install '{KNOWN}'"
        )


def _lacking(ours: type[Any], reads: tuple[str, ...], config: uvicorn.Config) -> Iterator[str]:
    base = ours.__mro__[1]
    for name, method in vars(ours).items():
        if (
            inspect.isfunction(method)
            and not name.startswith("_")
            and not _fits(method, getattr(base, name, None))
        ):
            yield f"{base.__name__}.{name}"
    try:
        protocol = base(
            config=config, server_state=ServerState(), app_state={}, _loop=asyncio.get_running_loop()
        )
    except TypeError:
        yield f"{base.__name__}(config, server_state, app_state)"
        return
    # The annotation of a class counts: a transport is there only once a connection is.
    declared = {name for each in base.__mro__ for name in getattr(each, "__annotations__", ())}
    yield from (
        f"{base.__name__}.{name}" for name in reads if not (name in declared or hasattr(protocol, name))
    )


def _fits(ours: Callable[..., Any], theirs: Callable[..., Any] | None) -> bool:
    """Whether a method can be called as the one that overrides it."""
    if theirs is None:
        return False
    try:
        # Packages for other servers wrap some of them, in whatever they take.
        inspect.signature(theirs).bind(*inspect.signature(ours).parameters)
    except TypeError:
        return False
    return True


def http_config(
    app: Application, settings: ServerSettings, admissions: Admissions | None = None
) -> uvicorn.Config:
    """How HTTP and sockets are served, whatever the process is; within a running event loop.

    Args:
        app: What answers.
        settings: Its bounds.
        admissions: In which turn of the loop requests are taken in and begun.

    Raises:
        ConfigurationError: The installed uvicorn is not one that this package works with.
    """
    admissions = Admissions() if admissions is None else admissions
    config = uvicorn.Config(
        _admitted(app, admissions),
        http=http_protocol(settings, admissions),
        ws=cast(Any, partial(CoalescingProtocol, admissions=admissions)),
        lifespan="off",
        ws_max_size=HARD_LIMIT_FACTOR * settings.max_request_bytes,
        # A client that waits minutes for a language model answers no pings. TCP keepalive finds dead peers.
        ws_ping_interval=None,
        ws_ping_timeout=None,
        ws_per_message_deflate=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_CLOSE_GRACE_S,
        access_log=False,
        server_header=False,
        log_config=None,
    )
    config.load()
    _check_uvicorn(config)
    return config


def _admitted(app: Application, admissions: Admissions) -> Application:
    """An application that begins with a request when its turn has come."""

    async def begin(
        scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
    ) -> None:
        if not admissions.are_open():
            await admissions.turn()
        await app(scope, receive, send)

    return begin


class EmbeddedServer(uvicorn.Server):
    """A server that leaves signals to the program around it."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers of uvicorn's."""
        yield


class DrainingServer(uvicorn.Server):
    """A server that finishes running operations before it closes its sockets.

    Args:
        config: How it serves.
        drain: Waits for the running operations.
    """

    def __init__(self, config: uvicorn.Config, drain: Callable[[], Awaitable[None]]) -> None:
        super().__init__(config)
        self._drain = drain
        self._loop = asyncio.get_running_loop()
        self._draining: asyncio.Task[None] | None = None
        self._signalled_at: float | None = None
        self.on_drain: Callable[[], Awaitable[None]] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first signal, give up at the second.

        A blocked loop handles neither signal. The second one then kills the process at once: child processes end with
        it, and sessions resume from their journals.
        """
        now = time.monotonic()
        if self._signalled_at is None:
            self._signalled_at = now
        elif self._draining is None and now - self._signalled_at > _STANDS_STILL_S:
            _log.error("ended while an inline environment held up the event loop")
            os._exit(128 + sig)
        self._loop.call_soon_threadsafe(self._begin_to_end)

    def _begin_to_end(self) -> None:
        if self._draining is not None:
            self.force_exit = self.should_exit = True
            return
        self._draining = asyncio.create_task(self._end())

    async def _end(self) -> None:
        try:
            if self.on_drain is not None:
                await self.on_drain()
            await self._drain()
        finally:
            # The process must end after a stop signal, even if a step of the shutdown fails.
            self.should_exit = True
