"""The parts of a gateway, put together: the servers that registered, and the sessions that nodes have."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from rollgym.env_server.access.tokens import Tokens
from rollgym.env_server.catalog.catalog import Catalog
from rollgym.env_server.common.io_process import ProcessRank
from rollgym.env_server.common.metrics import Metrics
from rollgym.env_server.common.settings import ConfigurationError, ServerSettings
from rollgym.env_server.gateway.adoption import Adoption
from rollgym.env_server.gateway.moves import Moves
from rollgym.env_server.gateway.registering import Announcements, Lineage, Registering
from rollgym.env_server.gateway.registry import Registration, Registry, Roster
from rollgym.env_server.gateway.relay import Relay
from rollgym.env_server.gateway.relayed_making import RelayedMaking
from rollgym.env_server.gateway.relayed_session import RelayedSession, SessionRelease, places_answered
from rollgym.env_server.gateway.relocation import Relocation
from rollgym.env_server.gateway.remote_worker import RemoteWorker
from rollgym.env_server.gateway.shared_relocation import SharedRelocation
from rollgym.env_server.gateway.step_shares import StepShares
from rollgym.env_server.gateway.upstream.node import Nodes
from rollgym.env_server.sessions.journal import EndReason
from rollgym.env_server.sessions.sessions import Sessions
from rollgym.extras import install_line

if TYPE_CHECKING:
    from rollgym.env_server.gateway.shared_journal import SharedJournal

_ROSTER = "registrations.json"
_MOVES = "moves.jsonl"


class Gateway:
    """What operations ask of a gateway. A server that is none has one, too, with which nobody registers.

    Args:
        settings: The operator's settings.
        rank: Which process this is.
        tokens: The owners of sessions.
        catalog: Offers the registered environments.
        sessions: The open sessions.
        metrics: Counts what nodes do.
        appeared: Called with the first registration of an environment.

    Attributes:
        roster: The registrations of other servers from before a restart.
        registry: The registrations.
        lineage: The gateways behind this one.
        worker: Holds the environments of registered servers that are not nodes.
        journal: The journal that gateways share, if they share one.
        registering: Takes a registration.
        announcements: Takes the registrations of one server together.
        making: Opens sessions at nodes.
        relay: Passes operations on to nodes.
        shares: Passes batches of steps on; None where each operation is passed on by itself.
    """

    def __init__(
        self,
        settings: ServerSettings,
        rank: ProcessRank,
        tokens: Tokens,
        catalog: Catalog,
        sessions: Sessions,
        metrics: Metrics,
        appeared: Callable[[Registration], None],
    ) -> None:
        directory = rank.directory
        self.roster = Roster(None if directory is None else directory / _ROSTER)
        self.registry = registry = Registry(appeared, catalog.remove, metrics, self.roster)
        self.lineage = Lineage(registry)
        self.worker = RemoteWorker(registry, metrics)
        self.journal = journal = _shared_journal(settings)
        nodes = Nodes(settings.max_portable_bytes)
        self.registering = Registering(settings, catalog, registry, nodes, self.lineage)
        self.announcements = Announcements(self.registering, registry)
        self._moves = Moves(directory / _MOVES if settings.gateway and directory is not None else None)
        release = SessionRelease(registry, self._moves, journal)
        shared = None
        if journal is not None:
            shared = SharedRelocation(settings, sessions, registry, nodes, metrics, journal)
        relocation = Relocation(settings, sessions, registry, nodes, metrics, self._moves, shared)
        adoption = Adoption(
            settings, tokens, catalog, sessions, registry, nodes, release, self._moves, shared
        )
        self.making = RelayedMaking(
            settings, tokens, sessions, registry, release, metrics, journal, relocation
        )
        self.relay = Relay(sessions, relocation, adoption, metrics, journal, is_gateway=settings.gateway)
        self.shares: StepShares | None = None
        if settings.gateway and journal is None:
            self.shares = StepShares(self.relay, sessions.by_id)
        self._sessions = sessions

    async def start(self) -> None:
        """Connect to the journal that gateways share, if they share one."""
        if self.journal is not None:
            await self.journal.start(
                partial(places_answered, self._sessions.by_id.values()), self._ended_elsewhere
            )

    def _ended_elsewhere(self, session_id: str, reason: EndReason) -> bool:
        """End a session here that another gateway has ended, so that it counts here no longer."""
        session = self._sessions.by_id.get(session_id)
        if not isinstance(session, RelayedSession):
            return False
        session.end_is_known = True
        self._sessions.end(session, reason)
        return True

    async def idle(self, patience_s: float) -> None:
        """Wait until no operation is on its way to a node; then answer those that are, and pass none on any more."""
        await self.relay.idle(patience_s)
        if self.shares is not None:
            self.shares.give_up()

    async def shutdown(self) -> None:
        """Cancel the operations in flight and the probes, and close the journals."""
        await self.relay.shutdown()
        self._moves.close()
        await self.announcements.shutdown()
        if self.journal is not None:
            await self.journal.close()


def _shared_journal(settings: ServerSettings) -> "SharedJournal | None":
    if settings.journal_url is None:
        return None
    try:
        # Gateways without a shared journal need none of it.
        from rollgym.env_server.gateway.shared_journal import SharedJournal
    except ImportError as error:
        raise ConfigurationError(
            f"journal_url needs the extra redis ({install_line('redis')}): {error}"
        ) from error
    return SharedJournal(settings.journal_url.get_secret_value(), settings.journal_replicas)
