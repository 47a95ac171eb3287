"""The internals of uvicorn that this package relies on; a check at the start of a server verifies them."""

import asyncio
import inspect
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from rollgym.env_server.common.settings import ConfigurationError
from rollgym.env_server.http.transport.connection import BoundedHttpProtocol
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
            *("close_sent", "conn", "disconnected", "frames", "handshake_complete", "loop", "queue"),
            *("read_paused", "send_receive_event_to_app", "transport", "writable"),
        ),
    }
)
"""The attributes of uvicorn's protocols that this package's read. Overridden methods are found by inspection."""


def check_uvicorn(config: uvicorn.Config) -> None:
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
