"""How a gateway lets go of a session that a node has."""

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from rollgym.clients.protocol.errors import ProblemError
from rollgym.env_server.gateway.journal_entries import JournalAway
from rollgym.env_server.gateway.moves import Moves
from rollgym.env_server.gateway.registry import Registry
from rollgym.env_server.gateway.relayed_session import RelayedSession
from rollgym.env_server.journal.journal import EndReason

if TYPE_CHECKING:
    from rollgym.env_server.gateway.shared_journal import SharedJournal

_CLOCK_SKEW_S = 1.0


class SessionRelease:
    """Ends sessions at their nodes.

    Args:
        registry: Counts the sessions of each registration.
        moves: The table of moved sessions.
        journal: The journal that gateways share, if there is one.
    """

    def __init__(self, registry: Registry, moves: Moves, journal: "SharedJournal | None" = None) -> None:
        self._moves = moves
        self._registry = registry
        self._journal = journal

    def to(self, session: RelayedSession, reason: EndReason) -> Coroutine[Any, Any, Any] | None:
        """End a session at its node; one that was not used here for long may be in use through another gateway."""
        self._moves.ended(session.session_id)
        if reason == "evicted":
            return self._unless_used(session)
        if reason == "lost" and session.home.has_other_gateways and self._journal is None:
            # Another gateway may know a session that this one does not.
            self._registry.released(session.home)
            return None
        session.node.close_session(session.upstream_id)
        self._registry.released(session.home)
        if self._journal is None or session.end_is_known:
            return None
        return self._tell(self._journal, session, reason, None)

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
        if idle_s >= unused_s - _CLOCK_SKEW_S and (
            self._journal is None or await self._tell(self._journal, session, "evicted", session.generation)
        ):
            session.node.close_session(session.upstream_id)
        self._registry.released(session.home)

    @staticmethod
    async def _tell(
        journal: "SharedJournal", session: RelayedSession, reason: EndReason, generation: int | None
    ) -> bool:
        """Write to the journal that a session has ended; return whether it has, as far as is known."""
        try:
            ((status, _, _),) = await journal.end([session.session_id], reason, generation)
        except JournalAway:
            # It ends by its idle time-out there and at its node.
            return False
        return status != "fenced"
