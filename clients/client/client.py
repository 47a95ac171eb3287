"""EnvClient: environments on a server, for asyncio. Its sessions are kept alive when a socket breaks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self

from rollgym.clients.client.answers import member, reading
from rollgym.clients.client.opener import SessionOpener
from rollgym.clients.client.operation import Batch, Operation, ResetResult, StepResult, wait_for_all
from rollgym.clients.client.session import EnvSession
from rollgym.clients.net.caller import Backpressure, ServerCalls
from rollgym.clients.net.pool import Timing
from rollgym.clients.protocol.addresses import explain_refusal, server_token
from rollgym.clients.protocol.arrays import DecodeError
from rollgym.clients.protocol.episode import PortableEpisode
from rollgym.clients.protocol.errors import ProblemError
from rollgym.clients.protocol.messages import EnvInfo, ServerInfo, VerdictReply
from rollgym.clients.protocol.values import encode_value


class SessionKeeper:
    """Knows the open sessions, and joins them to a new socket when theirs drops.

    A server ends sessions that no socket has used for a while after their last one dropped. A session whose player
    thinks for minutes would be lost in this way, although the client is there: so the client connects again at once,
    and asks after each of its sessions, which counts as use.

    Args:
        caller: How to reach the server.
    """

    def __init__(self, caller: ServerCalls) -> None:
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


_CLOSE_TIMEOUT_S = 5.0

Encoding = Literal["json", "msgpack"]
CONNECT_TIMEOUT_S = 15.0
"""How long a client waits for a server that was never reached, unless set otherwise."""


class EnvClient:
    """Environments on one server, over one WebSocket to each of its I/O processes.

    Any number of sessions share the sockets. The client reopens broken sockets and retries operations in flight, which
    the protocol makes safe; it also retries after `rate_limited`, `at_capacity`, `draining` and `overloaded`.

    Examples:
        >>> async with EnvClient("http://127.0.0.1:8000") as client:
        ...     session = await client.make("FrozenLake-v0")
        ...     observation, info = await session.reset(seed=0)
        ...     observation, reward, terminated, truncated, info = await session.step("Right")

    Args:
        url: The server's address, `http(s)://` or `ws(s)://`.
        token: Bearer token; that of the environment variable `ROLLGYM_TOKEN` if None. An empty one is not sent.
        encoding: `json`, or `msgpack` for large arrays.
        timeout_s: How long one operation may take, with all reconnects and retries.
        connect_timeout_s: How long to wait for a server that was never reached, whether it refuses, is not found, or
            says nothing.
        reconnect_timeout_s: How long to wait for a server that was reached before.
        on_outage: Called once with the reason when the server cannot be reached, and with None when it can again.
            Without it, a warning is logged.

    Attributes:
        url: The server's address.
        opener: Opens its sessions.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        encoding: Encoding = "json",
        timeout_s: float = 600.0,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        reconnect_timeout_s: float = 300.0,
        on_outage: Callable[[Exception | None], None] | None = None,
    ) -> None:
        if encoding not in ("json", "msgpack"):
            raise ValueError(f"encoding is json or msgpack, not {encoding!r}")
        if not connect_timeout_s > 0:
            raise ValueError(f"connect_timeout_s must be more than 0, not {connect_timeout_s}")
        self.url = url
        timing = Timing(connect_timeout_s, reconnect_timeout_s, timeout_s)
        token = server_token(token)
        self._caller = ServerCalls(url, token=token, binary=encoding == "msgpack", timing=timing)
        self._pool = self._caller.pool
        self._pool.on_outage = on_outage
        self._pool.explain = partial(explain_refusal, token=token)
        self._envs: dict[str, EnvInfo] = {}
        self._sessions = SessionKeeper(self._caller)
        self.opener = SessionOpener(self._caller)

    async def __aenter__(self) -> Self:
        """Connect, so that a wrong address shows here."""
        await self._pool.connection(None)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # -- the server

    async def info(self) -> ServerInfo:
        """Return the server's description of itself."""
        reply = await self._caller.call({"op": "info"}, None, self._caller.deadline())
        with reading("info"):
            return ServerInfo.model_validate(reply.payload)

    async def envs(self) -> list[EnvInfo]:
        """Return the descriptions of all environments that the server offers."""
        reply = await self._caller.call({"op": "envs"}, None, self._caller.deadline())
        with reading("envs"):
            return [EnvInfo.model_validate(each) for each in member(reply.payload, "envs", list)]

    async def env(self, env_id: str) -> EnvInfo:
        """Return one environment of the catalog.

        Raises:
            ProblemError: `unknown_env`.
        """
        reply = await self._caller.call({"op": "envs", "env_id": env_id}, None, self._caller.deadline())
        with reading("envs"):
            self._envs[env_id] = info = EnvInfo.model_validate(reply.payload)
        return info

    @property
    def backpressure(self) -> Backpressure:
        """How often the server was overloaded, and how long operations have waited for that."""
        return self._caller.backpressure

    # -- sessions

    async def make(
        self, env_id: str, kwargs: Mapping[str, Any] | None = None, *, idle_timeout_s: float | None = None
    ) -> EnvSession:
        """Make a session.

        Args:
            env_id: An id of the catalog.
            kwargs: Kwargs that the environment's `kwargs_schema` allows.
            idle_timeout_s: The server evicts the session after so many idle seconds.

        Raises:
            ProblemError: `unknown_env`, `invalid_kwargs`, `at_capacity` past the time-out, ...
        """
        return (await self.make_many(env_id, 1, kwargs, idle_timeout_s=idle_timeout_s))[0]

    async def make_many(
        self,
        env_id: str,
        count: int,
        kwargs: Mapping[str, Any] | None = None,
        *,
        idle_timeout_s: float | None = None,
    ) -> list[EnvSession]:
        """Make many sessions of one environment, spread over the server's processes; see `make`."""
        env = self._envs.get(env_id) or await self.env(env_id)
        deadline = self._caller.deadline()
        shares: list[tuple[int, int]] = []
        share = min(self._pool.max_batch, max(1, -(-count // len(self._pool.processes or [0]))))
        for first in range(0, count, share):
            shares.append((await self._pool.next_process(), min(share, count - first)))
        parts = [
            asyncio.ensure_future(self._make(env, kwargs or {}, size, idle_timeout_s, process, deadline))
            for process, size in shares
        ]
        try:
            made = await asyncio.gather(*parts, return_exceptions=True)
        except asyncio.CancelledError:
            # Sessions that are not there yet are closed by the call that waits for them.
            ready = [part for part in parts if part.done() and not part.cancelled() and not part.exception()]
            opened = [each for part in ready for each in part.result()]
            self.opener.in_background(partial(self.close_sessions, opened))
            raise
        sessions = [session for part in made if isinstance(part, list) for session in part]
        for part in made:
            if isinstance(part, BaseException):
                await self.close_sessions(sessions)
                raise part
        return sessions

    async def restore(self, episode: PortableEpisode) -> EnvSession:
        """Make a session at the point of a portable episode, from this server or from another.

        Raises:
            ProblemError: `session_gone` with reason `replay_diverged` if the replay differs.
        """
        env = self._envs.get(episode.env_id) or await self.env(episode.env_id)
        payload, process, theirs = await self.opener.restore(episode, self._caller.deadline())
        with reading("restore"):
            session = EnvSession(self, self._caller, env, episode.kwargs, payload, process)
        session.adopt(theirs)
        self.track(session)
        return session

    async def close_sessions(self, sessions: Iterable[EnvSession]) -> int:
        """Close many sessions in one frame for each process; return how many were open on the server."""
        groups: dict[int, list[str]] = {}
        for session in sessions:
            if not session.closed:
                session.mark_closed()
                self._sessions.drop(session)
                groups.setdefault(session.process, []).append(session.session_id)
        deadline = self._caller.deadline()
        replies = await wait_for_all(
            self._caller.call({"op": "close", "session_ids": session_ids}, process, deadline)
            for process, session_ids in groups.items()
        )
        with reading("close"):
            return sum(member(reply.payload, "closed", int) for reply in replies)

    async def close(self) -> None:
        """Close all sessions of this client, then the sockets."""
        if self._pool.processes:
            # A server that has ended or is ending drops the sessions of a closed socket by itself.
            with suppress(ConnectionError, TimeoutError, ProblemError, DecodeError):
                async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                    await self.close_sessions(self._sessions)
        self.opener.close()
        self._sessions.close()
        await self._pool.close()

    # -- many at once

    async def step_many(
        self, steps: Sequence[tuple[EnvSession, Any] | tuple[EnvSession, Any, bool]]
    ) -> list[StepResult | ProblemError]:
        """Take a step in many sessions in one frame.

        Args:
            steps: Session and action, and optionally whether to begin the next episode (see `EnvSession.step`).

        Returns:
            The results in the same order; a failed step has its problem in place of a result.
        """
        return await self.run_many(
            [session.plan_step(action, autoreset=bool(rest and rest[0])) for session, action, *rest in steps]
        )

    async def reset_many(
        self,
        resets: Sequence[
            tuple[EnvSession, int | None] | tuple[EnvSession, int | None, Mapping[str, Any] | None]
        ],
    ) -> list[ResetResult | ProblemError]:
        """Begin an episode in many sessions in one frame.

        Args:
            resets: Session and seed, and optionally options.

        Returns:
            The results in the same order; a failed reset has its problem in place of a result.
        """
        return await self.run_many(
            [session.plan_reset(seed, rest[0] if rest else None) for session, seed, *rest in resets]
        )

    async def run_many(self, operations: Sequence[Operation]) -> list[Any]:
        """Run operations of several sessions in one frame for each process; at most one for each session.

        Returns:
            The results in the same order; a failed operation has its `ProblemError` in place of a result.

        Raises:
            ConnectionError: The server cannot be reached.
            TimeoutError: The server does not answer.
        """
        return await Batch(self._caller, operations).run()

    # -- verifiers

    async def verify(
        self, env_id: str, items: Sequence[Mapping[str, Any]], *, timeout_s: float | None = None
    ) -> list[VerdictReply]:
        """Score responses with a stateless environment.

        Args:
            env_id: A stateless environment of the catalog.
            items: Each `{"response": ..., ...task fields}`.
            timeout_s: How long one item may take; the server's setting if None.

        Returns:
            Verdicts in the order of the items.

        Raises:
            ProblemError: `not_stateless`, `unknown_env`, ...
        """
        if not items:
            return []
        await self._pool.connection(None)
        share = min(self._pool.max_batch, -(-len(items) // max(1, len(self._pool.processes))))
        parts = [items[first : first + share] for first in range(0, len(items), share)]
        deadline = self._caller.deadline(None if timeout_s is None else timeout_s * share)
        verdicts = await wait_for_all(self._verify(env_id, part, timeout_s, deadline) for part in parts)
        return [verdict for part in verdicts for verdict in part]

    # -- for sessions

    async def remake(self, env_id: str, kwargs: Mapping[str, Any], deadline: float) -> tuple[str, int]:
        """Make a session for one that was lost; return its id and process."""
        env = await self.env(env_id)
        payloads, process = await self.opener.make(
            env.env_id, kwargs, 1, None, await self._pool.next_process(), deadline
        )
        with reading("make"):
            return member(payloads[0], "session_id", str), process

    def track(self, session: EnvSession) -> None:
        """Close this session with the client."""
        self._sessions.add(session)

    # -- inside

    async def _make(
        self,
        env: EnvInfo,
        kwargs: Mapping[str, Any],
        count: int,
        idle_timeout_s: float | None,
        process: int,
        deadline: float,
    ) -> list[EnvSession]:
        payloads, process = await self.opener.make(
            env.env_id, kwargs, count, idle_timeout_s, process, deadline
        )
        with reading("make"):
            sessions = [EnvSession(self, self._caller, env, kwargs, payload, process) for payload in payloads]
        for session in sessions:
            self.track(session)
        return sessions

    async def _verify(
        self, env_id: str, items: Sequence[Mapping[str, Any]], timeout_s: float | None, deadline: float
    ) -> list[VerdictReply]:
        fields: dict[str, Any] = {
            "op": "verify",
            "env_id": env_id,
            "items": [encode_value(None, item, binary=self._caller.binary) for item in items],
        }
        if timeout_s is not None:
            fields["timeout_s"] = timeout_s
        try:
            reply = await self._caller.call(fields, await self._pool.next_process(), deadline)
        except ProblemError as problem:
            if problem.code != "too_large" or len(items) == 1:
                raise
            half = len(items) // 2
            return [
                *await self._verify(env_id, items[:half], timeout_s, deadline),
                *await self._verify(env_id, items[half:], timeout_s, deadline),
            ]
        with reading("verify"):
            verdicts = [VerdictReply.model_validate(each) for each in member(reply.payload, "results", list)]
        if len(verdicts) != len(items):
            raise DecodeError(f"the server gave {len(verdicts)} verdicts on {len(items)} items")
        return verdicts
