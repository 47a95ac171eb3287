"""Finding sessions again: at their node once it is back, on another node, or after a start of the gateway."""

import asyncio
import logging
from collections.abc import Collection
from dataclasses import replace
from typing import Any, NoReturn

from rollgym.clients.net.transport import ConnectionLost
from rollgym.clients.protocol.errors import ProblemError
from rollgym.env_server.access.tokens import Caller, Tokens
from rollgym.env_server.catalog.catalog import Catalog
from rollgym.env_server.common.settings import Settings
from rollgym.env_server.gateway.moves import Moves
from rollgym.env_server.gateway.registry import Registration, Registry
from rollgym.env_server.gateway.relayed_session import UNREADABLE, RelayedSession
from rollgym.env_server.gateway.session_names import SessionName, parse_session_name
from rollgym.env_server.gateway.session_release import SessionRelease
from rollgym.env_server.gateway.shared_relocation import (
    RECONNECT_S,
    SharedRelocation,
    begin_anew,
)
from rollgym.env_server.gateway.upstream.node import Node, Nodes
from rollgym.env_server.journal.journal import Journal
from rollgym.env_server.sessions.sessions import Sessions, session_gone, unknown_session
from rollgym.env_server.telemetry.metrics import Metrics

# A node that is started again registers again within this time, as a rule.
PATIENCE_S = 15.0
# Nodes register again with a restarted gateway within this time, or are gone for good.
_REGISTRATION_PATIENCE_S = 120.0
_log = logging.getLogger(__name__)


class Relocation:
    """Recovers sessions whose nodes do not answer.

    Args:
        settings: Time-outs.
        tokens: The owners of sessions.
        catalog: The environments.
        sessions: The open sessions.
        registry: The registrations.
        nodes: The nodes.
        release: Ends sessions.
        metrics: Counts the sessions that were moved.
        moves: The table of moved sessions.
        shared: Finds sessions in the journal that gateways share, if they share one.
    """

    def __init__(
        self,
        settings: Settings,
        tokens: Tokens,
        catalog: Catalog,
        sessions: Sessions,
        registry: Registry,
        nodes: Nodes,
        release: SessionRelease,
        metrics: Metrics,
        moves: Moves,
        shared: SharedRelocation | None,
    ) -> None:
        self._moves = moves
        self._shared = shared
        self._metrics = metrics
        self._settings = settings
        self._tokens = tokens
        self._catalog = catalog
        self._sessions = sessions
        self._registry = registry
        self._nodes = nodes
        self._session_release = release
        self._loop = asyncio.get_running_loop()
        self._started_at = self._loop.time()
        self._adopting: dict[str, asyncio.Task[RelayedSession]] = {}

    # -- a node that is away -------------------------------------------------------------------------------------

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
            upstream_id, process = await begin_anew(
                home,
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

    # -- sessions that this gateway has not seen -----------------------------------------------------------------

    async def adopt(self, caller: Caller, session_id: str) -> RelayedSession:
        """Adopt a session that another gateway was passing on, or this one before its restart.

        Raises:
            ProblemError: `unknown_session`, `session_gone`, or `draining` while its node is not registered.
        """
        name = parse_session_name(session_id)
        owner = None if name is None else self._owner(caller, name)
        if name is None or owner is None:
            raise unknown_session(session_id)
        adopting = self._adopting.get(session_id)
        if adopting is None:
            adopting = self._loop.create_task(self._adopt(owner, session_id, name))
            self._adopting[session_id] = adopting
            adopting.add_done_callback(lambda done: self._adopting.pop(session_id))
        return await asyncio.shield(adopting)

    def is_of(self, caller: Caller, session_id: str) -> bool:
        """Whether a session that was made through a gateway is the caller's, or the caller an admin."""
        name = parse_session_name(session_id)
        return name is not None and self._owner(caller, name) is not None

    def close_at(self, key: str, upstream_id: str) -> None:
        """End a session at a node, if that is known."""
        node = self._nodes.find(key)
        if node is not None:
            node.close_session(upstream_id)

    def close(self, caller: Caller, session_id: str) -> bool:
        """End a session of the caller's at its node, if that is known."""
        name = parse_session_name(session_id)
        if name is None or self._owner(caller, name) is None:
            return False
        key, upstream_id = self._moves.place(session_id) or (name.node, name.upstream_id)
        self._moves.ended(session_id)
        node = self._nodes.find(key)
        if node is not None:
            node.close_session(upstream_id)
        return node is not None

    def _owner(self, caller: Caller, name: SessionName) -> Caller | None:
        candidates = list(self._tokens.everybody()) if caller.is_admin else [caller]
        return next((each for each in candidates if name.is_of(self._tokens.key(each.name))), None)

    async def _adopt(self, owner: Caller, session_id: str, name: SessionName) -> RelayedSession:
        if self._shared is not None:
            return await self._adopt_shared(self._shared, owner, session_id, name)
        moved = self._moves.place(session_id)
        if moved is not None:
            name = replace(name, node=moved[0], upstream_id=moved[1])
        node = await self._find(session_id, name)
        described = await self._ask(node, session_id, name, "session")
        home = self._registry.at_node(node, str(described.get("env_id")))
        entry = None if home is None else self._catalog.find(home.env_id)
        if home is None or entry is None:
            raise _not_registered(session_id)
        episode = await self._ask(node, session_id, name, "episode")
        session = RelayedSession(
            session_id,
            entry=entry,
            owner=owner.name,
            idle_timeout_s=self._settings.idle_timeout_s,
            now=self._loop.time(),
            home=home,
            node=node,
            upstream_id=name.upstream_id,
            process=None,
            journal=Journal(entry.env_id, entry.version, {}),
            release=self._session_release,
        )
        try:
            await session.take_episode(episode)
            session.terminated, session.truncated = described["terminated"], described["truncated"]
        except UNREADABLE as error:
            raise ProblemError("upstream_error", f"the session cannot be read: {error!r}") from error
        session.lingers = name.lingers
        # If the node has other gateways, its sessions never move. A single gateway moves them, and after a restart
        # knows which ones only if it keeps a file.
        session.is_proven = home.has_other_gateways or self._moves.are_known
        self._sessions.reserve(owner, 1)
        self._registry.took(home)
        self._sessions.add(session)
        return session

    async def _adopt_shared(
        self, shared: SharedRelocation, owner: Caller, session_id: str, name: SessionName
    ) -> RelayedSession:
        """Adopt a session from the shared journal; its node is looked up at its first operation."""
        found = await shared.find(session_id)
        env_id = found.about.env_id
        deadline = self._loop.time() + PATIENCE_S
        while (home := self._registry.any_home(env_id)) is None:
            if self._loop.time() >= deadline:
                raise _not_registered(session_id)
            await self._registry.changed(deadline - self._loop.time())
        entry = self._catalog.get(env_id)
        session = RelayedSession(
            session_id,
            entry=entry,
            owner=owner.name,
            idle_timeout_s=found.about.idle_timeout_s,
            now=self._loop.time(),
            home=home,
            node=home.node,
            upstream_id=found.upstream_id,
            process=None,
            journal=Journal(env_id, found.about.env_version, found.about.kwargs),
            release=self._session_release,
        )
        session.learn(found)
        session.is_placed = False
        session.lingers = name.lingers
        self._sessions.reserve(owner, 1)
        self._registry.took(home)
        self._sessions.add(session)
        return session

    async def _find(self, session_id: str, name: SessionName) -> Node:
        deadline = self._loop.time() + PATIENCE_S
        while True:
            node = self._nodes.find(name.node)
            if node is not None:
                return node
            if self._loop.time() > self._started_at + _REGISTRATION_PATIENCE_S:
                raise session_gone(session_id, "lost")
            if self._loop.time() >= deadline:
                raise _not_registered(session_id)
            await self._registry.changed(deadline - self._loop.time())

    async def _ask(self, node: Node, session_id: str, name: SessionName, op: str) -> dict[str, Any]:
        caller = node.link(False).caller
        fields = {"op": op, "session_id": name.upstream_id}
        try:
            reply = await caller.call(fields, None, caller.deadline())
        except ProblemError as problem:
            if problem.code == "unknown_session":
                raise session_gone(session_id, "lost") from problem
            raise renamed(problem, name.upstream_id, session_id) from problem
        except (ConnectionLost, ConnectionError, TimeoutError) as error:
            raise ProblemError("upstream_error", str(error)) from error
        if not isinstance(reply.payload, dict):
            raise ProblemError("upstream_error", f"{op} is answered with {type(reply.payload).__name__}")
        return reply.payload


def renamed(problem: ProblemError, upstream_id: str, session_id: str) -> ProblemError:
    """A node's problem for the client: with the client's id of the session, and without details of the node."""
    if problem.kind.kept_from_clients:
        problem = ProblemError("upstream_error", f"the node answers {problem}")
    if upstream_id not in problem.detail:
        return problem
    return ProblemError(problem.code, problem.detail.replace(upstream_id, session_id), **problem.extra)


def _not_registered(session_id: str) -> ProblemError:
    return ProblemError(
        "draining", f"the server that has session {session_id!r} has not registered yet", retry_after=1
    )
