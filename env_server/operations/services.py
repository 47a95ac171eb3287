"""The parts of one I/O process, put together."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from rollgym.clients.protocol.errors import ProblemError
from rollgym.env_server.access.context import Context
from rollgym.env_server.access.quotas import OpenSockets, QuotaCounters, RateLimit
from rollgym.env_server.access.tokens import Tokens
from rollgym.env_server.catalog.catalog import Catalog
from rollgym.env_server.common.event_loop import Admissions
from rollgym.env_server.common.io_process import Lifecycle, ProcessRank, ServerPhase, Unanswered
from rollgym.env_server.common.loop_watch import LoopWatch
from rollgym.env_server.common.metrics import EnvironmentLabels, Metrics
from rollgym.env_server.common.overload import Overload
from rollgym.env_server.common.settings import ConfigurationError, ServerSettings
from rollgym.env_server.gateway.gateway import Gateway
from rollgym.env_server.gateway.peers import Peers, RequestAffinity
from rollgym.env_server.gateway.registering import catalog_entry
from rollgym.env_server.gateway.registry import Registration
from rollgym.env_server.operations.episodes import Rendering, Resetting
from rollgym.env_server.operations.information import Information
from rollgym.env_server.operations.making import Making
from rollgym.env_server.operations.operations import Calls, Operations
from rollgym.env_server.operations.reports import Reports
from rollgym.env_server.operations.runner import Runner, WorkerPools
from rollgym.env_server.operations.sandbox import InteractiveSessions, Programs
from rollgym.env_server.operations.server_metrics import ServerState
from rollgym.env_server.operations.stepping import Stepping
from rollgym.env_server.operations.verifying import Verifying
from rollgym.env_server.sessions.journal_file import JournalError, JournalFile
from rollgym.env_server.sessions.replies import Reply
from rollgym.env_server.sessions.session import BaseSession
from rollgym.env_server.sessions.sessions import SessionRestore, Sessions
from rollgym.extras import install_line

if TYPE_CHECKING:
    from rollgym.env_server.operations.tracing import TracedOperations

_log = logging.getLogger(__name__)

# Nodes register again within seconds.
_REGISTRATION_PATIENCE_S = 120.0


class Services:
    """Everything that answers operations in one I/O process.

    It is made, started, and in the end stopped, within a running event loop.

    Args:
        settings: The operator's settings.
        rank: Which process this is.
        tokens: The tokens of callers.
        catalog: The environments that are served.
    """

    def __init__(self, settings: ServerSettings, rank: ProcessRank, tokens: Tokens, catalog: Catalog) -> None:
        self.settings = settings
        # Looked at for every answer.
        self.portable_limit = settings.max_portable_bytes
        self.rank = rank
        self.tokens = tokens
        self.lifecycle = Lifecycle()
        self.metrics = Metrics(EnvironmentLabels(settings.max_env_labels))
        self.admissions = Admissions()
        self.overload = Overload(settings.max_queue_s, self.admissions)
        self._catalog = catalog
        self._quota_counters = QuotaCounters(rank)
        self._affinity = RequestAffinity(rank)
        self._journal_file = _journal_file(rank)
        self._sessions = Sessions(settings, rank, self._quota_counters, self.metrics, self._journal_file)
        self._gateway = gateway = Gateway(
            settings, rank, tokens, catalog, self._sessions, self.metrics, self._appeared
        )
        catalog.absence = gateway.roster.absence
        self._worker_pools = WorkerPools(settings, gateway.worker)
        self.loop_watch = LoopWatch(
            self.metrics, {each: self._worker_pools.get(each).times for each in ("inline", "thread")}
        )
        self._session_restore: SessionRestore | None = None
        self._peers = Peers(rank)
        state = ServerState(
            settings=settings,
            rank=rank,
            metrics=self.metrics,
            sessions=self._sessions.by_id,
            pools=self._worker_pools,
            registry=gateway.registry,
            journal_file=self._journal_file,
            shared_journal=gateway.journal,
        )
        self.reports = Reports(state, self.lifecycle, gateway.roster, self._peers)
        self._runner = Runner(settings, self.metrics, self._sessions)
        resetting = Resetting(settings, self.metrics, self._runner, self._journal_file)
        self._making = Making(
            settings,
            catalog,
            self._sessions,
            self._runner,
            resetting,
            gateway.making,
            self._worker_pools.of,
            self._journal_file,
        )
        self.sockets = OpenSockets(settings)
        self._programs = Programs(settings, self.metrics) if settings.runs_code else None
        operations = Operations(
            lifecycle=self.lifecycle,
            sessions=self._sessions,
            resetting=resetting,
            stepping=Stepping(settings, self.metrics, self._runner, resetting, self._journal_file),
            rendering=Rendering(self._runner),
            making=self._making,
            verifying=Verifying(settings, catalog, self.metrics, self._worker_pools.of_verifier),
            running_code=None if self._programs is None else self._programs.running,
            gateway=gateway,
            information=Information(settings, rank, catalog, self._sessions, self._peers, gateway.lineage),
            peers=self._peers,
            affinity=self._affinity,
            metrics=self.metrics,
            rate=RateLimit(settings.rate_limit),
            rank=rank,
            overload=self.overload,
        )
        self._tracing = _tracing(settings, rank, operations, self._sessions.by_id)
        self.operations: Calls = operations if self._tracing is None else self._tracing
        self.on_socket_dropped: Callable[[], None] | None = None
        self.unanswered = Unanswered()

    def _appeared(self, registration: Registration) -> None:
        entry = catalog_entry(registration, self._gateway.registry, self.settings)
        entry.label = self.metrics.labels.of(entry.env_id)
        self._catalog.put(entry)
        if self._session_restore is not None:
            self._making.recall(self._session_restore.appeared(registration.env_id))

    async def start(self) -> None:
        """Start the workers and look at every environment once.

        Raises:
            ConfigurationError: If an environment cannot be made.
        """
        await self._gateway.start()
        if self._programs is not None:
            await self._programs.start()
        await self._worker_pools.start(self._catalog)
        self.loop_watch.start()
        self.overload.start()
        if self._journal_file is not None:
            self._session_restore = SessionRestore(
                *(self._journal_file, self._catalog, self.tokens, self._sessions, self._worker_pools.of),
                patience_s=_REGISTRATION_PATIENCE_S if self.settings.gateway else 0.0,
            )
            self._session_restore.begin()
            self._making.recall(self._journal_file.sessions)
        await self._peers.start(self._answer_peer, self._peer_lost)
        self.lifecycle.phase = ServerPhase.READY

    def reload_tokens(self) -> None:
        """Read the token file again; end the sessions, sockets and registrations of revoked tokens."""
        try:
            self.tokens.reload()
        except ConfigurationError as error:
            _log.error("the tokens stay as they are: %s", error)
            return
        self.sockets.look_again(self.tokens)
        for session in list(self._sessions.by_id.values()):
            if self.tokens.named(session.owner) is None:
                self._sessions.end(session, "evicted")
        for registration in list(self._gateway.registry):
            if self.tokens.named(registration.owner) is None:
                self._gateway.registry.remove(registration)
        _log.warning("the token file was read again")

    @property
    def interactive_sessions(self) -> InteractiveSessions | None:
        """The interactive sessions with programs; None where nothing runs in a sandbox of this server."""
        return None if self._programs is None else self._programs.interactive

    @property
    def keeps_traces(self) -> bool:
        """Whether operations are recorded as traces."""
        return self._tracing is not None

    def about(self, session_id: str | None) -> dict[str, str]:
        """The subject of a log record, if that is a session of this process."""
        session = None if session_id is None else self._sessions.by_id.get(session_id)
        return {} if session is None else {"env_id": session.entry.env_id}

    def load(self) -> float:
        """How full the server is, from 0 to 1; one that is behind counts as full."""
        return 1.0 if self.overload.is_behind else self._sessions.count() / self.settings.max_sessions

    def capacity(self) -> dict[str, int]:
        """How many sessions there are, and how many there may be."""
        return {"active_sessions": self._sessions.count(), "max_sessions": self.settings.max_sessions}

    def socket_dropped(self, context: Context) -> None:
        """Note that a socket has closed: sessions made on sockets end some time after their last socket closes."""
        context.dropped = True
        for session_id in context.sessions:
            session = self._sessions.by_id.get(session_id)
            if session is not None:
                self._sessions.leave(session, context.socket or "")
        if self.on_socket_dropped is not None:
            self.on_socket_dropped()
        if context.remote:
            self.unanswered.add(asyncio.get_running_loop().create_task(self._peers.socket_dropped(context)))

    # -- the other processes -------------------------------------------------------------------------------------

    async def _answer_peer(
        self, identity: Mapping[str, Any], op: str, fields: dict[str, Any], binary: bool
    ) -> Reply:
        """Answer a call that reached another process first."""
        task = asyncio.current_task()
        assert task is not None
        self.unanswered.add(task)
        if op in ("metrics", "ready"):
            return await self.reports.of_this_process(op)
        if op == "socket_dropped":
            self._sessions.leave_all(lambda socket: socket == identity["socket"])
            return {}
        caller = self.tokens.named(identity["name"])
        if caller is None:
            raise ProblemError("unauthorized", "this token is not known")
        context = Context(
            caller,
            binary=binary,
            socket=identity["socket"],
            forwarded=True,
            traceparent=identity["traceparent"],
            call_id=identity["call_id"],
        )
        context.waited_s = self.overload.excess_s()
        reply = self.operations.call(context, op, fields)
        return reply if isinstance(reply, dict) else await reply

    def _peer_lost(self, index: int) -> None:
        """Note that another process has ended, and its sockets with it."""
        prefix = f"{index}."
        self._sessions.leave_all(lambda socket: socket.startswith(prefix))

    # -- the end -------------------------------------------------------------------------------------------------

    async def drain(self) -> None:
        """Refuse new sessions and let running operations finish, within the grace period; later ones get an error."""
        self.lifecycle.phase = ServerPhase.DRAINING
        deadline = asyncio.get_running_loop().time() + self.settings.drain_grace_s
        await self._runner.idle(self.settings.drain_grace_s)
        await self._gateway.idle(max(0.0, deadline - asyncio.get_running_loop().time()))
        if self._programs is not None:
            await self._programs.running.idle(max(0.0, deadline - asyncio.get_running_loop().time()))
        await self.unanswered.settle(max(0.0, deadline - asyncio.get_running_loop().time()))

    async def stop(self) -> None:
        """End the workers; the sessions stay in their journals."""
        self.loop_watch.stop()
        self.overload.stop()
        await self._peers.close()
        if self._programs is not None:
            await self._programs.close()
        await self._sessions.shutdown()
        await self._gateway.shutdown()
        await self._worker_pools.shutdown()
        if self._journal_file is not None:
            self._journal_file.close()
        if self._tracing is not None:
            await self._tracing.close()
        self._quota_counters.close()
        self._affinity.close()


def _tracing(
    settings: ServerSettings, rank: ProcessRank, operations: Operations, sessions: Mapping[str, BaseSession]
) -> "TracedOperations | None":
    if settings.trace_endpoint is None:
        return None
    try:
        # Servers that keep no traces need none of it.
        from rollgym.env_server.operations.tracing import TracedOperations
    except ImportError as error:
        raise ConfigurationError(
            f"trace_endpoint needs the extra otel ({install_line('otel')}): {error}"
        ) from error
    return TracedOperations(operations, sessions, rank, settings.trace_endpoint, settings.trace_ratio)


def _journal_file(rank: ProcessRank) -> JournalFile | None:
    if rank.directory is None:
        return None
    try:
        return JournalFile(rank.directory / f"journal-{rank.index}.bin")
    except JournalError as error:
        raise ConfigurationError(str(error)) from error
