"""Closing sessions, wherever they are: here, in other processes of this server, and at nodes."""

import asyncio
from collections.abc import Awaitable, Mapping
from typing import Any

from rollgym.clients.protocol.messages import CloseRequest
from rollgym.env_server.access.context import Context
from rollgym.env_server.gateway.relay import Relay
from rollgym.env_server.messages.validation import invalid, requested
from rollgym.env_server.operations.making import Making
from rollgym.env_server.peers.peers import Peers
from rollgym.env_server.sessions.replies import Reply, opened_sessions
from rollgym.env_server.sessions.sessions import Sessions

_MAX_CLOSE = 65536


class Closing:
    """Closes sessions.

    Args:
        sessions: Those that are here.
        making: Closes those.
        relay: Closes those at nodes that no call here was passed on to.
        peers: Closes those of other processes.
    """

    def __init__(self, sessions: Sessions, making: Making, relay: Relay, peers: Peers) -> None:
        self._sessions = sessions
        self._making = making
        self._relay = relay
        self._peers = peers
        self._running: set[asyncio.Future[Reply]] = set()

    def close(self, context: Context, fields: Mapping[str, Any]) -> Reply | Awaitable[Reply]:
        """Close one session (`session_id`) or many (`session_ids`), wherever they are."""
        if "session_id" in fields:
            if "session_ids" in fields:
                raise invalid("session_ids", "give session_id or session_ids, not both")
            fields = {**fields, "session_ids": [fields["session_id"]]}
            del fields["session_id"]
        request = requested(CloseRequest, fields)
        if len(request.session_ids) > _MAX_CLOSE:
            raise invalid("session_ids", f"at most {_MAX_CLOSE}")
        elsewhere: dict[int, list[str]] = {}
        here = []
        for session_id in dict.fromkeys(request.session_ids):
            owner = self._sessions.index_of(session_id)
            if owner is not None and self._peers.is_elsewhere(owner):
                elsewhere.setdefault(owner, []).append(session_id)
            else:
                here.append(session_id)
        if self._relay.shares_a_journal:
            return self._close_shared(context, here, elsewhere)
        unseen = [each for each in here if each not in self._sessions.by_id and self._relay.may_adopt(each)]
        closed = self._making.close(context, here) + self._relay.close_unseen(context.caller, unseen)
        if not elsewhere:
            return {"closed": closed}
        return self._close_elsewhere(context, elsewhere, closed)

    def take_back(self, context: Context, reply: Reply) -> int:
        """Close the sessions opened by an answer that cannot be sent, and count them: no client knows their ids."""
        session_ids = opened_sessions(reply)
        if session_ids:
            self._making.forget(context.caller.name, session_ids)
            closing = self.close(context, {"session_ids": session_ids})
            if not isinstance(closing, dict):
                task = asyncio.ensure_future(closing)
                self._running.add(task)
                task.add_done_callback(self._running.discard)
        return len(session_ids)

    async def _close_shared(
        self, context: Context, here: list[str], elsewhere: Mapping[int, list[str]]
    ) -> Reply:
        relayed = [each for each in here if self._relay.may_adopt(each)]
        closed = await self._relay.close_shared(context.caller, relayed)
        closed += self._making.close(context, set(here).difference(relayed))
        return await self._close_elsewhere(context, elsewhere, closed)

    async def _close_elsewhere(
        self, context: Context, elsewhere: Mapping[int, list[str]], closed: int
    ) -> Reply:
        calls = (
            self._peers.call(context, owner, "close", {"session_ids": session_ids})
            for owner, session_ids in elsewhere.items()
        )
        replies = await asyncio.gather(*calls)
        return {"closed": closed + sum(reply["closed"] for reply in replies)}
