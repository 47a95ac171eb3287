"""A node: a Rollgym server behind a gateway, and the connections to it."""

import asyncio
import base64
import hashlib
from typing import Any

from rollgym.clients.net.caller import Caller
from rollgym.clients.net.pool import Timing
from rollgym.clients.protocol.errors import ProblemError
from rollgym.env_server.gateway.upstream.link import Link
from rollgym.env_server.gateway.upstream.targets import Target

NODE_KEY_CHARACTERS = 8
_KEY_BYTES = 5
# A node that is away for longer has its sessions rebuilt on another one.
_CONNECT_S = 5.0
_RECONNECT_S = 5.0
_OPERATION_S = 60.0
# A node that owes an answer and is silent for both together is given up.
_SILENCE_S = 5.0
_PONG_S = 10.0
_CLOSE_S = 10.0
# How long the sessions of an unregistered server are remembered, in case it comes back.
_REMEMBERED_S = 3600.0


def node_key(url: str, owner: str) -> str:
    """The key of a node: the same for every gateway, and after every restart.

    Args:
        url: The node's URL.
        owner: The name of the token that registered it, so that no other owner can act for it.
    """
    digest = hashlib.blake2b(f"{owner} {url}".encode(), digest_size=_KEY_BYTES).digest()
    return base64.b32encode(digest).decode().lower()


class Node:
    """The connections to one node, made when they are needed.

    Args:
        target: The node's address.
        token: Bearer token for it.
        owner: The name of the token that registered it.
        max_reply_bytes: Larger replies are refused.

    Attributes:
        key: Its name in the ids of sessions.
        registrations: How many registrations use it.
        abandoned: Sessions that it may still have, though they moved to another node or were closed.
        released_at: When its last registration ended, on the loop's clock.
        was_compared: Whether its limits were compared with those of the gateway.
    """

    def __init__(self, target: Target, token: str | None, owner: str, max_reply_bytes: int) -> None:
        self.target = target
        self.key = node_key(target.url, owner)
        self.token = token
        self.registrations = 0
        self.abandoned: list[str] = []
        self.released_at = 0.0
        self.was_compared = False
        self._max_reply_bytes = max_reply_bytes
        self._links: dict[bool, Link] = {}
        self._to_close: list[str] = []
        self._closing: set[asyncio.Task[None]] = set()

    def link(self, binary: bool) -> Link:
        """The way to the node in one encoding."""
        link = self._links.get(binary)
        if link is None:
            link = self._links[binary] = Link(self._connect(binary))
        return link

    @property
    def largest_restore(self) -> int:
        """How many bytes it takes to restore a session, as it said when it was connected to."""
        return self.link(True).caller.pool.request_limit("restore")

    def close_session(self, upstream_id: str) -> None:
        """End a session there, together with all others of this turn of the loop."""
        if not self._to_close:
            asyncio.get_running_loop().call_soon(self._close_sessions)
        self._to_close.append(upstream_id)

    def is_there(self) -> None:
        """Note a heartbeat: end the sessions that the node may still have from before it was away."""
        abandoned, self.abandoned = self.abandoned, []
        for upstream_id in abandoned:
            self.close_session(upstream_id)

    async def release(self) -> None:
        """Note that a registration does not use it any more."""
        self.registrations -= 1
        if self.registrations <= 0:
            self.released_at = asyncio.get_running_loop().time()
            if self._closing:
                await asyncio.wait(self._closing)
            links, self._links = list(self._links.values()), {}
            for link in links:
                link.close()
                await link.caller.pool.close()

    def _connect(self, binary: bool) -> Caller:
        return Caller(
            self.target.url,
            token=self.token,
            binary=binary,
            timing=Timing(_CONNECT_S, _RECONNECT_S, _OPERATION_S, _SILENCE_S, _PONG_S),
            address=self.target.address,
            max_message_bytes=self._max_reply_bytes,
        )

    def _close_sessions(self) -> None:
        upstream_ids, self._to_close = self._to_close, []
        task = asyncio.get_running_loop().create_task(self._close_all(upstream_ids))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _close_all(self, upstream_ids: list[str]) -> None:
        caller = self.link(True).caller
        fields: dict[str, Any] = {"op": "close", "session_ids": upstream_ids}
        try:
            await caller.call(fields, None, caller.deadline(_CLOSE_S))
        except (ConnectionError, TimeoutError, ProblemError):
            # The close is repeated at its next heartbeat; sessions that it no longer has are not an error there.
            self.abandoned.extend(upstream_ids)


class Nodes:
    """The nodes that servers are registered at; the registrations of one server share one node."""

    def __init__(self, max_reply_bytes: int) -> None:
        self._max_reply_bytes = max_reply_bytes
        self._by_key: dict[str, Node] = {}

    def take(self, target: Target, token: str | None, owner: str) -> Node:
        """The node for one more registration."""
        self._forget()
        before = self._by_key.get(node_key(target.url, owner))
        if before is not None and (before.target, before.token) == (target, token):
            node = before
        else:
            node = Node(target, token, owner, self._max_reply_bytes)
            if before is not None:
                node.abandoned, before.abandoned = before.abandoned, []
            self._by_key[node.key] = node
        node.registrations += 1
        return node

    def find(self, key: str) -> Node | None:
        """The node that ids of sessions call so, if there is one at present."""
        node = self._by_key.get(key)
        return node if node is not None and node.registrations > 0 else None

    def _forget(self) -> None:
        """Drop nodes without registrations, except those that may come back with sessions."""
        remembered = asyncio.get_running_loop().time() - _REMEMBERED_S
        self._by_key = {
            key: node
            for key, node in self._by_key.items()
            if node.registrations > 0 or (node.abandoned and node.released_at > remembered)
        }
