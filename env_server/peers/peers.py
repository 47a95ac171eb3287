"""Calls to the other I/O processes of this server, which own their sessions."""

import contextlib
from collections.abc import Mapping
from typing import Any

from rollgym.clients.protocol.errors import ProblemError
from rollgym.env_server.access.context import Context
from rollgym.env_server.common.io_process import ProcessRank, Reason
from rollgym.env_server.peers.forwarder import Forwarder
from rollgym.env_server.sessions.replies import Reply

# Callers that ask for readiness do not wait for long.
_READY_WITHIN_S = 0.5
_RETRY_S = 2


class Peers:
    """Calls operations in the process that owns a session, or in all processes.

    A call that came from a peer is not forwarded again.

    Args:
        rank: Which process this is.
        forwarder: The connections to the others, or None for a single process.
    """

    def __init__(self, rank: ProcessRank, forwarder: Forwarder | None) -> None:
        self._rank = rank
        self._forwarder = forwarder

    def is_elsewhere(self, index: int) -> bool:
        """Whether an index is that of another process."""
        return index != self._rank.index

    async def call(self, context: Context, index: int, op: str, fields: Mapping[str, Any]) -> Reply:
        """Call an operation in another process.

        Raises:
            ProblemError: The problem that it answers there, or `draining` while the process is away.
        """
        if self._forwarder is None or context.forwarded:
            raise RuntimeError(f"process {index} is not a peer of process {self._rank.index}")
        context.remote.add(index)
        reply: Reply = await self._forwarder.call(index, context.identity(), op, fields, context.binary)
        return reply

    async def gather(self, context: Context, op: str, fields: Mapping[str, Any]) -> list[Reply]:
        """Call an operation in all other processes; those that do not answer are left out."""
        if self._forwarder is None or context.forwarded:
            return []
        return await self._forwarder.gather(context.identity(), op, fields, context.binary)

    async def gather_all(self, context: Context, op: str, fields: Mapping[str, Any]) -> list[Reply]:
        """Call an operation in all other processes.

        Raises:
            ProblemError: `draining`, if one does not answer.
        """
        replies = await self.gather(context, op, fields)
        if not context.forwarded and len(replies) < self._rank.processes - 1:
            raise ProblemError(
                "draining", "an I/O process of this server does not answer", retry_after=_RETRY_S
            )
        return replies

    async def readiness(self) -> list[Reason]:
        """Why other processes are not ready; one that does not answer at once is not."""
        if self._forwarder is None:
            return []
        replies = await self._forwarder.gather({}, "ready", {}, False, _READY_WITHIN_S)
        answered = {reply["process"] for reply in replies} | {self._rank.index}
        found = [Reason(*reason) for reply in replies for reason in reply["reasons"]]
        for index in range(self._rank.processes):
            if index not in answered:
                found.append(Reason("process_away", f"I/O process {index} does not answer", index))
        return found

    async def socket_dropped(self, context: Context) -> None:
        """Notify the processes that received forwarded calls of a socket that it has closed."""
        if self._forwarder is None:
            return
        for index in context.remote:
            # A process that is away knows it: its connections to this process have closed, too.
            with contextlib.suppress(ProblemError):
                await self._forwarder.call(index, context.identity(), "socket_dropped", {}, False)
