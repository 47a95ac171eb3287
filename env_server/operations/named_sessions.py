"""Sessions under names: for protocols in which a client names a session before it chooses the environment."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import Any

from rollgym.clients.protocol.errors import ProblemError
from rollgym.env_server.access.context import Context
from rollgym.env_server.common.io_process import ProcessRank
from rollgym.env_server.common.requests import invalid
from rollgym.env_server.operations.making import Closing, Making
from rollgym.env_server.sessions.replies import Reply
from rollgym.env_server.sessions.sessions import Sessions, session_gone, unknown_session

_FEW = 1024

# Resets that had a request id can be answered again.
_REQUEST_ID = "named"

_Key = tuple[str, str]
_Call = Callable[[Context, str, Mapping[str, Any]], Reply | Awaitable[Reply]]


@dataclass(slots=True, eq=False)
class _Named:
    """One name: the requests that made and reset its session, and the session's id once that is done."""

    wanted: tuple[Mapping[str, Any], Mapping[str, Any]]
    making: "asyncio.Task[str]" = field(init=False)
    session_id: str | None = None
    closed: bool = False


class NamedSessions:
    """Makes, finds and closes sessions by names; each caller has names of its own.

    The digest of a name chooses the I/O process that holds its session, so any process can be asked. Names live as long
    as the process; between gateways, a balancer has to send one name to one gateway.

    Args:
        rank: Which process this is.
        sessions: The sessions of this process.
        making: Makes them.
        closing: Closes them.
        call: Runs operations on them, wherever they are.
    """

    def __init__(
        self, rank: ProcessRank, sessions: Sessions, making: Making, closing: Closing, call: _Call
    ) -> None:
        self._processes = rank.processes
        self._sessions = sessions
        self._making = making
        self._closing = closing
        self._call = call
        self._named: dict[_Key, _Named] = {}
        self._enough = _FEW

    def owner_of(self, context: Context, fields: Mapping[str, Any]) -> int:
        """Return the index of the process that holds a name."""
        digest = blake2b("\0".join(_key(context, fields)).encode(), digest_size=8).digest()
        return int.from_bytes(digest) % self._processes

    async def open(self, context: Context, fields: Mapping[str, Any]) -> Reply:
        """Make the session of a name and begin its episode; a repeated request gets the same answer.

        The session is made even if its client stops waiting: the name leads to it.

        Args:
            context: The caller.
            fields: `name`, and the requests `make` and `reset`.

        Raises:
            ProblemError: `invalid_request` if the name has a session of another request; any of make and reset.
        """
        key, wanted = _key(context, fields), (fields["make"], fields["reset"])
        named = self._named.get(key)
        if named is None or self._has_ended(named):
            self._forget_ended()
            named = self._named[key] = _Named(wanted)
            named.making = asyncio.get_running_loop().create_task(self._make(context, named))
            named.making.add_done_callback(partial(self._settle, context, key, named))
        elif named.wanted != wanted:
            raise invalid("name", "this session exists already, with another task")
        return {"session_id": await asyncio.shield(named.making)}

    async def find(self, context: Context, fields: Mapping[str, Any]) -> Reply:
        """Return the id of a name's session, which counts as use of it; one that is being made is awaited.

        Raises:
            ProblemError: `unknown_session`, `session_gone`, or why it could not be made.
        """
        named = self._named.get(_key(context, fields))
        if named is None:
            raise unknown_session(fields["name"])
        session_id = await asyncio.shield(named.making)
        session = self._sessions.by_id.get(session_id)
        if session is not None:
            session.last_used = asyncio.get_running_loop().time()
        elif (reason := self._sessions.end_reason(session_id)) is not None:
            raise session_gone(fields["name"], reason)
        return {"session_id": session_id}

    async def close(self, context: Context, fields: Mapping[str, Any]) -> Reply:
        """Close a name's session, also one that is still being made, and count it; the name is free again."""
        named = self._named.pop(_key(context, fields), None)
        if named is None:
            return {"closed": 0}
        named.closed = True
        if named.session_id is None:
            return {"closed": 1}
        closing: Reply | Awaitable[Reply] = self._closing.close(context, {"session_ids": [named.session_id]})
        return closing if isinstance(closing, dict) else await closing

    async def _make(self, context: Context, named: _Named) -> str:
        make, reset = named.wanted
        session_id = str((await self._making.make(context, make))["session_id"])
        begun = False
        try:
            begin = {**reset, "session_id": session_id, "request_id": _REQUEST_ID}
            reply = self._call(context, "reset", begin)
            if not isinstance(reply, dict):
                await reply
            begun = True
        finally:
            if not begun:
                self._making.close(context, [session_id])
        named.session_id = session_id
        return session_id

    def _settle(self, context: Context, key: _Key, named: _Named, making: "asyncio.Task[str]") -> None:
        if making.cancelled() or making.exception() is not None:
            if self._named.get(key) is named:
                del self._named[key]
        elif named.closed:
            self._making.close(context, [making.result()])

    def _has_ended(self, named: _Named) -> bool:
        return named.session_id is not None and self._sessions.end_reason(named.session_id) is not None

    def _forget_ended(self) -> None:
        """Forget the names of ended sessions, when they may be half of all: amortized constant time for each name."""
        if len(self._named) < self._enough:
            return
        self._named = {
            key: named
            for key, named in self._named.items()
            if named.session_id is None or named.session_id in self._sessions.by_id
        }
        self._enough = max(_FEW, 2 * len(self._named))


def _key(context: Context, fields: Mapping[str, Any]) -> _Key:
    name = fields.get("name")
    if type(name) is not str:
        raise ProblemError("invalid_request", "a session's name is text")
    return context.caller.name, name
