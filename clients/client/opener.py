"""Opens and finds sessions on a server, and closes those whose callers have left."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from rollgym.clients.client.answers import member, reading
from rollgym.clients.net.caller import ServerCalls
from rollgym.clients.net.connection import Reply
from rollgym.clients.protocol.arrays import DecodeError
from rollgym.clients.protocol.episode import PortableEpisode
from rollgym.clients.protocol.errors import GONE, ProblemError
from rollgym.clients.protocol.values import encode_value

_TAKE_BACK_S = 60.0

UNANSWERED = (asyncio.CancelledError, TimeoutError, ConnectionError)
"""Errors of a request that the server may have carried out, or may still carry out."""


class SessionOpener:
    """Opens sessions on a server, for the client and in place of lost sessions.

    Args:
        caller: How to reach the server.
    """

    def __init__(self, caller: ServerCalls) -> None:
        self._caller = caller
        self._taking_back: set[asyncio.Task[None]] = set()

    async def make(
        self,
        env_id: str,
        kwargs: Mapping[str, Any],
        count: int,
        idle_timeout_s: float | None,
        process: int,
        deadline: float,
    ) -> tuple[list[dict[str, Any]], int]:
        """Make sessions; return the server's answer for each, and their process."""
        fields: dict[str, Any] = {
            "op": "make",
            "env_id": env_id,
            "request_id": self._caller.new_request_id(),
        }
        if kwargs:
            fields["kwargs"] = encode_value(None, kwargs, binary=self._caller.binary)
        if count > 1:
            fields["count"] = count
        if idle_timeout_s is not None:
            fields["idle_timeout_s"] = idle_timeout_s
        reply = await self._open(fields, process, deadline)
        with reading("make"):
            made = member(reply.payload, "sessions", list) if count > 1 else [reply.payload]
        if len(made) != count:
            raise DecodeError(f"the server made {len(made)} sessions, and not {count}")
        return made, reply.process

    async def restore(
        self, episode: PortableEpisode, deadline: float
    ) -> tuple[dict[str, Any], int, PortableEpisode]:
        """Restore a portable episode; return the new session, its process, and its own portable episode."""
        request_id = self._caller.new_request_id()
        fields = {"op": "restore", "episode": episode.model_dump(mode="json"), "request_id": request_id}
        process = await self._caller.pool.next_process()
        reply = await self._open(fields, process, deadline)
        try:
            with reading("restore"):
                session_id = member(reply.payload, "session_id", str)
            record = await self._caller.call(
                {"op": "episode", "session_id": session_id}, reply.process, deadline
            )
            with reading("episode"):
                return reply.payload, reply.process, PortableEpisode.model_validate(record.payload)
        except BaseException:
            self.take_back(fields, process)
            raise

    async def rebuild(self, mine: PortableEpisode, deadline: float) -> tuple[str, int, PortableEpisode]:
        """Restore an episode that was lost; return the id of its session, its process, and its own portable episode.

        Raises:
            ProblemError: `session_gone`, if the replay differs.
        """
        payload, process, theirs = await self.restore(mine, deadline)
        # The restoring server compares digests too; a third party's server may not.
        same = (theirs.reset_digest, theirs.digests) == (mine.reset_digest, mine.digests)
        if not same or len(theirs.actions) != len(mine.actions):
            await self._caller.call(
                {"op": "close", "session_ids": [payload["session_id"]]}, process, deadline
            )
            raise ProblemError(
                "session_gone",
                "the replayed episode differs from the one that was lost",
                reason="replay_diverged",
            )
        return payload["session_id"], process, theirs

    async def is_at(
        self, former: tuple[str, int], env_id: str, episode: PortableEpisode, deadline: float
    ) -> bool:
        """Whether a session is there, at the point of an episode or one step further."""
        session_id, process = former
        try:
            reply = await self._caller.call({"op": "session", "session_id": session_id}, process, deadline)
        except ProblemError as problem:
            if problem.code in GONE:
                return False
            raise
        there = reply.payload
        with reading("session"):
            ahead = there["step"] - len(episode.actions) if type(there["step"]) is int else -1
            place = there["env_id"], there["episode"], there["seed"]
        same = place == (env_id, episode.episode, episode.seed)
        return same and ahead in (0, 1)

    async def close_replaced(self, session_id: str, deadline: float) -> None:
        """Leave nothing of a session that another one stands for now."""
        # One that cannot be closed ends by its idle time-out.
        with suppress(ProblemError):
            await self._caller.call({"op": "close", "session_ids": [session_id]}, None, deadline)

    def take_back(self, fields: Mapping[str, Any], process: int) -> None:
        """Close, in the background, the sessions that an abandoned request opens or has opened.

        The server repeats its answer to a known `request_id`, which names the sessions to close.
        """
        self.in_background(partial(self._take_back, dict(fields), process))

    def in_background(self, closing: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        """Close sessions in a background task."""

        async def close() -> None:
            # Sessions that cannot be closed end by their idle time-out, or with the socket.
            with suppress(ConnectionError, TimeoutError, ProblemError, DecodeError):
                await closing()

        task = asyncio.ensure_future(close())
        self._taking_back.add(task)
        task.add_done_callback(self._taking_back.discard)

    def close(self) -> None:
        """Take nothing back any more."""
        for task in self._taking_back:
            task.cancel()

    async def _open(self, fields: dict[str, Any], process: int, deadline: float) -> Reply:
        """Send a request that opens sessions; if the caller is cancelled, the sessions are closed."""
        try:
            return await self._caller.call(fields, process, deadline)
        except UNANSWERED:
            self.take_back(fields, process)
            raise

    async def _take_back(self, fields: dict[str, Any], process: int) -> None:
        deadline = asyncio.get_running_loop().time() + _TAKE_BACK_S
        reply = await self._caller.call(fields, process, deadline)
        with reading(fields["op"]):
            opened = reply.payload.get("sessions", [reply.payload])
            session_ids = reply.payload.get("session_ids") or [each["session_id"] for each in opened]
        await self._caller.call({"op": "close", "session_ids": session_ids}, reply.process, deadline)
