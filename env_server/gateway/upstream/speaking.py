"""How a gateway speaks the protocols of registered servers: each is imported for the first server that speaks it."""

import asyncio
from importlib import import_module
from typing import NamedTuple

from rollgym.clients.protocol.upstream_protocols import UPSTREAM_PROTOCOLS, UpstreamProtocol
from rollgym.env_server.common.requests import invalid
from rollgym.env_server.gateway.upstream.base import Upstream


class SpokenProtocol(NamedTuple):
    """A protocol, and how it is spoken."""

    protocol: UpstreamProtocol
    upstream: type[Upstream]


class SpokenProtocols:
    """The protocols that servers of this gateway have spoken so far."""

    def __init__(self) -> None:
        self._found: dict[str, SpokenProtocol] = {}

    async def find(self, name: str) -> SpokenProtocol:
        """A protocol by name, one that `ProtocolName` accepts.

        Raises:
            ProblemError: `invalid_request`, if the package that adds it is broken.
        """
        found = self._found.get(name)
        if found is None:
            try:
                # The loop goes on meanwhile: a package may import a lot.
                found = self._found[name] = await asyncio.to_thread(_imported, name)
            except ValueError as error:
                raise invalid("protocol", str(error)) from error
        return found


def _imported(name: str) -> SpokenProtocol:
    protocol = UPSTREAM_PROTOCOLS[name]
    module, _, attribute = protocol.upstream.partition(":")
    try:
        found = getattr(import_module(module), attribute, None)
    except Exception as error:  # the boundary to the code of another package
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"the upstream protocol {name!r} cannot be loaded: {reason}") from error
    if not (isinstance(found, type) and issubclass(found, Upstream) and found.protocol == name):
        raise ValueError(f"the upstream protocol {name!r}: {protocol.upstream} is no Upstream of this name")
    return SpokenProtocol(protocol, found)
