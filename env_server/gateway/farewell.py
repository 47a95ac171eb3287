"""How a gateway lets go of a session that a node has."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from clients.protocol.errors import ProblemError
from env_server.gateway.registry import Registry
from env_server.gateway.relayed import RelayedSession
from env_server.held import EndReason

_CLOCK_SKEW_S = 1.0


class Farewell:
    """Ends sessions at their nodes.

    Args:
        registry: Counts the sessions of each registration.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def to(self, session: RelayedSession, reason: EndReason) -> Coroutine[Any, Any, None] | None:
        """End a session at its node; one that was not used here for long may be in use through another gateway."""
        if reason == "evicted":
            return self._unless_used(session)
        session.node.close_session(session.upstream_id)
        self._registry.released(session.home)
        return None

    async def _unless_used(self, session: RelayedSession) -> None:
        unused_s = asyncio.get_running_loop().time() - session.last_used
        caller = session.node.link(False).caller
        try:
            reply = await caller.call(
                {"op": "session", "session_id": session.upstream_id}, session.process, caller.deadline()
            )
            idle_s = float(reply.payload["idle_s"])
        except (ConnectionError, TimeoutError, ProblemError, KeyError, TypeError, ValueError):
            # The node is away, or does not have it any more.
            idle_s = unused_s
        if idle_s >= unused_s - _CLOCK_SKEW_S:
            session.node.close_session(session.upstream_id)
        self._registry.released(session.home)
