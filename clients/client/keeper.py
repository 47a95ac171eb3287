"""The sessions of a client, kept alive when a socket breaks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress

from rollgym.clients.client.session import EnvSession
from rollgym.clients.net.caller import Caller
from rollgym.clients.protocol.errors import ProblemError


class SessionKeeper:
    """Knows the open sessions, and joins them to a new socket when theirs drops.

    A server ends sessions that no socket has used for a while after their last one dropped. A session whose player
    thinks for minutes would be lost in this way, although the client is there: so the client connects again at once,
    and asks after each of its sessions, which counts as use.

    Args:
        caller: How to reach the server.
    """

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self._sessions: dict[EnvSession, None] = {}  # in the order of making; a set has none
        self._rejoining: dict[int, asyncio.Task[None]] = {}
        caller.pool.on_lost = self._lost

    def __iter__(self) -> Iterator[EnvSession]:
        return iter(list(self._sessions))

    def add(self, session: EnvSession) -> None:
        """Keep a session alive until it is dropped."""
        self._sessions[session] = None

    def drop(self, session: EnvSession) -> None:
        """Forget a session that is closed."""
        self._sessions.pop(session, None)

    def close(self) -> None:
        """Forget all sessions, and stop joining them."""
        self._sessions.clear()
        for task in self._rejoining.values():
            task.cancel()

    def _lost(self, process: int) -> None:
        if process not in self._rejoining and any(each.process == process for each in self._sessions):
            task = asyncio.ensure_future(self._rejoin(process))
            self._rejoining[process] = task
            task.add_done_callback(lambda _: self._rejoining.pop(process, None))

    async def _rejoin(self, process: int) -> None:
        deadline = self._caller.deadline()
        # An operation on the session meets the same error and raises it; no caller awaits this task.
        with suppress(ConnectionError, TimeoutError, ProblemError):
            await self._caller.pool.connection(process)
            size = self._caller.pool.max_batch
            session_ids = [each.session_id for each in self._sessions if each.process == process]
            for first in range(0, len(session_ids), size):
                part = session_ids[first : first + size]
                ops = [{"op": "session", "session_id": session_id} for session_id in part]
                await self._caller.call({"op": "batch", "ops": ops}, process, deadline)
