"""Adopting sessions that this gateway has not seen: of another gateway, or from before its own restart."""

import asyncio
from dataclasses import replace
from typing import Any

from rollgym.clients.net.connection import ConnectionLost
from rollgym.clients.protocol.errors import ProblemError
from rollgym.env_server.access.tokens import Caller, Tokens
from rollgym.env_server.catalog.catalog import Catalog
from rollgym.env_server.common.settings import SessionSettings
from rollgym.env_server.gateway.moves import Moves, SessionName, parse_session_name
from rollgym.env_server.gateway.registry import PATIENCE_S, Registry
from rollgym.env_server.gateway.relayed_session import UNREADABLE, RelayedSession, SessionRelease, renamed
from rollgym.env_server.gateway.shared_relocation import SharedRelocation
from rollgym.env_server.gateway.upstream.node import Node, Nodes
from rollgym.env_server.sessions.journal import Journal
from rollgym.env_server.sessions.sessions import Sessions, session_gone, unknown_session

# Nodes register again with a restarted gateway within this time, or are gone for good.
_REGISTRATION_PATIENCE_S = 120.0


class Adoption:
    """Finds sessions by their ids, which name the node that has them and carry their owner's signature.

    Args:
        settings: Time-outs.
        tokens: The owners of sessions.
        catalog: The environments.
        sessions: The open sessions.
        registry: The registrations.
        nodes: The nodes.
        release: Ends sessions.
        moves: The table of moved sessions.
        shared: Finds sessions in the journal that gateways share, if they share one.
    """

    def __init__(
        self,
        settings: SessionSettings,
        tokens: Tokens,
        catalog: Catalog,
        sessions: Sessions,
        registry: Registry,
        nodes: Nodes,
        release: SessionRelease,
        moves: Moves,
        shared: SharedRelocation | None,
    ) -> None:
        self._settings = settings
        self._tokens = tokens
        self._catalog = catalog
        self._sessions = sessions
        self._registry = registry
        self._nodes = nodes
        self._session_release = release
        self._moves = moves
        self._shared = shared
        self._loop = asyncio.get_running_loop()
        self._started_at = self._loop.time()
        self._adopting: dict[str, asyncio.Task[RelayedSession]] = {}

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


def _not_registered(session_id: str) -> ProblemError:
    return ProblemError(
        "draining", f"the server that has session {session_id!r} has not registered yet", retry_after=1
    )
