"""A gateway in the test's own process and event loop, whose parts a test can reach between two awaits."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from rollgym.env_server.access.context import Context
from rollgym.env_server.access.tokens import ANYONE, Tokens
from rollgym.env_server.catalog.catalog import Catalog
from rollgym.env_server.common.io_process import ProcessRank
from rollgym.env_server.common.settings import ServerSettings
from rollgym.env_server.gateway.gateway import Gateway
from rollgym.env_server.gateway.registry import Registration
from rollgym.env_server.gateway.shared_journal import SharedJournal
from rollgym.env_server.operations.services import Services
from rollgym.env_server.sessions.sessions import Sessions
from tests.support.client_server import ServerProcess


class GatewayHere:
    """A gateway without its listening port: operations are called, and all behind it is real.

    Attributes:
        gateway: Its parts.
        sessions: Its open sessions.
    """

    def __init__(self, services: Services) -> None:
        self._services = services
        self.gateway: Gateway = services._gateway
        self.sessions: Sessions = services._sessions

    @property
    def journal(self) -> SharedJournal:
        """The journal that it shares with others."""
        journal = self.gateway.journal
        assert journal is not None
        return journal

    async def call(self, op: str, **fields: Any) -> Any:
        context = Context(ANYONE, binary=False, forwarded=True)
        reply = self._services.operations.call(context, op, fields)
        return reply if isinstance(reply, dict) else await reply

    async def register(self, node: ServerProcess, env_id: str = "Walk-v0", **more: Any) -> Registration:
        """Register an environment of a node."""
        fields = {"env_id": env_id, "url": node.url, "protocol": "rollgym", "ttl_s": 600, **more}
        registered = await self.call("register", **fields)
        return self.gateway.registry.get(registered["registration_id"], None)


@asynccontextmanager
async def gateway_here(**settings: Any) -> AsyncIterator[GatewayHere]:
    """Run a gateway in this process while the context is open."""
    chosen = ServerSettings(gateway=True, builtin=False, workers=1, allow_network=("loopback",), **settings)
    services = Services(chosen, ProcessRank(), Tokens.load(None), Catalog.load(chosen))
    await services.start()
    try:
        yield GatewayHere(services)
    finally:
        await services.stop()
