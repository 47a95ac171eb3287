"""Recovering sessions whose nodes do not answer: at their node once it is back, or on another one."""

import asyncio
import logging
from collections.abc import Collection
from typing import NoReturn

from rollgym.clients.protocol.errors import ProblemError
from rollgym.env_server.common.metrics import Metrics
from rollgym.env_server.common.settings import TimeoutSettings
from rollgym.env_server.gateway.moves import Moves
from rollgym.env_server.gateway.registry import Registration, Registry
from rollgym.env_server.gateway.relayed_session import RelayedSession
from rollgym.env_server.gateway.shared_relocation import RECONNECT_S, SharedRelocation
from rollgym.env_server.gateway.upstream.node import Nodes
from rollgym.env_server.sessions.sessions import Sessions, session_gone

_log = logging.getLogger(__name__)


class Relocation:
    """Recovers sessions whose nodes do not answer.

    Args:
        settings: Time-outs.
        sessions: The open sessions.
        registry: The registrations.
        nodes: The nodes.
        metrics: Counts the sessions that were moved.
        moves: The table of moved sessions.
        shared: Finds sessions in the journal that gateways share, if they share one.
    """

    def __init__(
        self,
        settings: TimeoutSettings,
        sessions: Sessions,
        registry: Registry,
        nodes: Nodes,
        metrics: Metrics,
        moves: Moves,
        shared: SharedRelocation | None,
    ) -> None:
        self._moves = moves
        self._shared = shared
        self._metrics = metrics
        self._settings = settings
        self._sessions = sessions
        self._registry = registry
        self._nodes = nodes
        self._loop = asyncio.get_running_loop()

    async def bring_back(self, session: RelayedSession, *, gone: bool, deadline: float, binary: bool) -> None:
        """Make sure that a session is at a node that answers.

        Args:
            session: The session.
            gone: Whether its node has lost it.
            deadline: When to give up, on the loop's clock.
            binary: The encoding of the coming request: each encoding has connections of its own.

        Raises:
            ProblemError: `session_gone`, or `upstream_error` if no node answers in time.
        """
        if self._shared is not None:
            await self._shared.bring_back(session, gone=gone, deadline=deadline, binary=binary)
            return
        trouble = "its node does not have it any more"
        while True:
            if not gone:
                node = self._nodes.find(session.node.key) or session.node
                try:
                    async with asyncio.timeout(RECONNECT_S):
                        await node.link(binary).caller.pool.connection(session.process)
                except (ConnectionError, TimeoutError, ProblemError) as error:
                    trouble = str(error) or f"{node.target.url} does not answer"
                    self._registry.failed(session.home)
                else:
                    session.node = node
                    return
            if await self._begin_anew(session, without=() if gone else (session.home,)):
                return
            left = deadline - self._loop.time()
            if left <= 0:
                raise ProblemError("upstream_error", f"{session.entry.env_id}: {trouble}")
            await self._registry.changed(min(left, RECONNECT_S))

    async def _begin_anew(self, session: RelayedSession, *, without: Collection[Registration]) -> bool:
        """Restore a session at another node; False if none takes it at present."""
        entry = session.entry
        if session.episode >= 0 and not entry.deterministic:
            if without:
                # Its node may come back with it.
                return False
            self._lose(session)
        home = await self._registry.place(entry.env_id, 0.0, without=without)
        if home is None and without:
            return False
        if session.incomplete or session.home.has_other_gateways:
            # Another gateway may have passed steps on, or moved it; this gateway cannot know.
            if home is not None:
                self._registry.released(home)
            self._lose(session)
        if home is None:
            return False
        node = home.node
        try:
            upstream_id, process = await node.begin_anew(
                home.upstream_env_id,
                session.portable() if session.episode >= 0 else None,
                session.journal.kwargs,
                idle_timeout_s=session.idle_timeout_s,
                make_timeout_s=self._settings.make_timeout_s,
            )
        except BaseException as error:
            self._registry.released(home)
            if isinstance(error, ConnectionError | TimeoutError):
                self._registry.failed(home)
                return False
            if isinstance(error, ProblemError):
                return self._not_restored(session, home, error)
            raise
        if self._sessions.by_id.get(session.session_id) is not session:
            # It was ended while it was rebuilt, and its old place released.
            node.close_session(upstream_id)
            self._registry.released(home)
            raise session_gone(session.session_id, self._sessions.end_reason(session.session_id) or "closed")
        self._moves.moved(session.session_id, node.key, upstream_id)
        session.node.abandoned.append(session.upstream_id)
        self._registry.released(session.home)
        session.live_at(home, node, upstream_id, process)
        self._metrics.failovers[entry.label] += 1
        self._metrics.rebuilds[entry.label, "ok"] += 1
        _log.warning("session %s goes on at %s", session.session_id, node.target.url)
        return True

    def _lose(self, session: RelayedSession) -> NoReturn:
        """End a session that cannot be recovered.

        Raises:
            ProblemError: `session_gone`.
        """
        self._sessions.end(session, "lost")
        raise session_gone(session.session_id, "lost")

    def _not_restored(self, session: RelayedSession, home: Registration, problem: ProblemError) -> bool:
        if problem.kind.retry_later:
            self._registry.failed(home)
            return False
        if problem.code == "session_gone" and problem.extra.get("reason") == "replay_diverged":
            self._metrics.rebuilds[session.entry.label, "diverged"] += 1
            self._sessions.end(session, "replay_diverged")
            raise session_gone(session.session_id, "replay_diverged") from problem
        if problem.kind.forbids_restoring:
            _log.error(
                "session %s is lost: %s cannot restore it: %s", session.session_id, home.target.url, problem
            )
            self._lose(session)
        raise ProblemError("upstream_error", f"{home.target.url} cannot restore it: {problem}") from problem
