"""All operations, under the names that the socket uses; HTTP calls the same ones."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Protocol

from rollgym.clients.protocol.errors import ProblemError
from rollgym.env_server.access.context import Context
from rollgym.env_server.access.quotas import RateLimit
from rollgym.env_server.common.event_loop import Pending, Slices, is_given_up
from rollgym.env_server.common.io_process import Lifecycle, ProcessRank
from rollgym.env_server.common.logs import log_fields
from rollgym.env_server.common.metrics import TIMED_STEPS, Metrics
from rollgym.env_server.common.overload import Overload, overloaded
from rollgym.env_server.common.requests import invalid, refuse_fields
from rollgym.env_server.gateway.gateway import Gateway
from rollgym.env_server.gateway.peers import Peers, RequestAffinity
from rollgym.env_server.gateway.relayed_session import RelayedSession
from rollgym.env_server.operations.episodes import Rendering, Resetting
from rollgym.env_server.operations.information import Information
from rollgym.env_server.operations.making import Closing, Making
from rollgym.env_server.operations.named_sessions import NamedSessions
from rollgym.env_server.operations.sandbox import RunningCode
from rollgym.env_server.operations.stepping import Stepping
from rollgym.env_server.operations.verifying import Verifying
from rollgym.env_server.sessions.journal import DIGEST_BYTES, MANY_STEPS, unpacked
from rollgym.env_server.sessions.replies import Reply
from rollgym.env_server.sessions.session import BaseSession, LocalSession
from rollgym.env_server.sessions.sessions import Sessions

SOCKET_OPS = frozenset(
    {
        *("make", "reset", "step", "render", "cancel", "fork", "episode", "restore", "close", "verify"),
        *("envs", "info", "ping", "session"),
    }
)
"""The operations that a frame may name, beside `batch` and `auth`, which are the socket's own."""

OPEN_NAMED, FIND_NAMED, CLOSE_NAMED = "open_named", "find_named", "close_named"
"""The operations of protocols that name sessions beforehand; no frame may name them."""

_BEGINS = frozenset({"make", "reset", "step", "render", "fork", "restore", "verify", "run_code", OPEN_NAMED})
"""The operations that an overloaded server refuses. All others cost little, or reduce its load."""

_MAX_SHOWN = 100

_log = logging.getLogger(__name__)

SessionHandler = Callable[[Context, LocalSession, Mapping[str, Any]], "Reply | Awaitable[Reply]"]
Handler = Callable[[Context, Mapping[str, Any]], "Reply | Awaitable[Reply]"]


class Calls(Protocol):
    """The interface for calling operations."""

    def call(self, context: Context, op: str, fields: Mapping[str, Any]) -> Reply | Awaitable[Reply]:
        """Run an operation and return its answer."""

    def share_out(self, context: Context, ops: list[Any]) -> Pending | None:
        """Pass on a batch that holds nothing but steps of sessions at nodes; None if it is not one."""

    def end(self, context: Context, session_id: str) -> None:
        """Close a session that was made here for no longer than a call or a socket of another protocol."""

    def take_back(self, context: Context, reply: Reply) -> int:
        """Close the sessions that an answer has opened which cannot be sent, and count them."""


class Operations:
    """Finds the handler of an operation, and the session that it is about.

    A handler that needs to wait for nothing answers at once; the others give an awaitable.
    """

    def __init__(
        self,
        *,
        lifecycle: Lifecycle,
        sessions: Sessions,
        resetting: Resetting,
        stepping: Stepping,
        rendering: Rendering,
        making: Making,
        verifying: Verifying,
        running_code: RunningCode | None,
        gateway: Gateway,
        information: Information,
        peers: Peers,
        affinity: RequestAffinity,
        metrics: Metrics,
        rate: RateLimit,
        rank: ProcessRank,
        overload: Overload,
    ) -> None:
        self._lifecycle = lifecycle
        self._sessions = sessions
        self._by_id = sessions.by_id
        self._making = making
        self._relay = gateway.relay
        self._shares = gateway.shares
        self._peers = peers
        self._affinity = affinity
        self._metrics = metrics
        self._calls = 0
        self._closing = Closing(sessions, making, gateway.relay, peers)
        self._names = NamedSessions(rank, sessions, making, self._closing, self.call)
        self._answered = metrics.answered
        self._seconds = metrics.seconds
        self._rate = rate
        self._overload = overload
        self._time = asyncio.get_running_loop().time
        self._on_session: dict[str, SessionHandler] = {
            "step": stepping.step,
            "reset": resetting.reset,
            "render": rendering.render,
            "cancel": _cancel,
            "fork": self._fork,
            "episode": self._episode,
            "session": self._session,
        }
        self._general: dict[str, Handler] = {
            "make": self._make,
            "restore": self._restore,
            "close": self._closing.close,
            "verify": verifying.verify,
            "envs": information.environments,
            "info": information.server,
            "sessions": information.sessions,
            "ping": _ping,
            "announce": gateway.announcements.announce,
            "register": gateway.registering.register,
            "heartbeat": gateway.registering.heartbeat,
            "unregister": gateway.registering.unregister,
            OPEN_NAMED: self._open_named,
            FIND_NAMED: partial(self._by_name, FIND_NAMED, self._names.find),
            CLOSE_NAMED: partial(self._by_name, CLOSE_NAMED, self._names.close),
        }
        if running_code is not None:
            self._running_code = running_code
            self._general |= {"run_code": self._run_code, "sandbox": running_code.sandbox}

    def call(self, context: Context, op: str, fields: Mapping[str, Any]) -> Reply | Awaitable[Reply]:
        """Run an operation, and count it.

        Raises:
            ProblemError: Any of the protocol's problems; the awaitable raises them, too.
        """
        self._calls += 1
        timed = op != "step" or self._calls % TIMED_STEPS == 0
        began = time.perf_counter() if timed else 0.0
        try:
            if context.waited_s and op in _BEGINS:
                raise self._overloaded(context, fields)
            handler = self._on_session.get(op)
            if handler is None:
                reply = self._call_general(context, op, fields)
            else:
                session = self._find(context, op, fields)
                if context.call_id is not None and session is not None:
                    reply = self._call_named(context, session, op, fields)
                    if type(session) is not LocalSession:
                        # The relay counts what it has passed on.
                        return reply
                elif type(session) is LocalSession:
                    reply = handler(context, session, fields)
                elif session is None:
                    reply = self._absent(context, op, fields)
                else:
                    reply = self._pass_on(context, session, op, fields)
        except ProblemError as problem:
            self._count_problem(context, op, fields, problem)
            raise
        except Exception as error:
            raise self._defect(context, op, fields, error) from error
        if type(reply) is not dict:
            if isinstance(reply, Pending):
                # The relay counts what it has passed on.
                return reply
            return self._later(context, op, fields, began or time.perf_counter(), reply)
        # The process that a forwarded call came to first counts it.
        if not context.forwarded:
            self._answered[op] += 1
            if timed:
                seconds = time.perf_counter() - began
                self._seconds[op].add(seconds, TIMED_STEPS if op == "step" else 1)
        return reply

    def share_out(self, context: Context, ops: list[Any]) -> Pending | None:
        """Pass on a batch that holds nothing but steps of sessions at nodes; None if it is not one."""
        if self._shares is None or context.waited_s or self._rate.of(context.caller) is not None:
            return None
        return self._shares.share_out(context, ops)

    def _overloaded(self, context: Context, fields: Mapping[str, Any]) -> ProblemError:
        """The problem that a call has waited for too long; its session was used all the same."""
        self._overload.note_refusal(context.waited_s)
        session_id = fields.get("session_id")
        session = self._by_id.get(session_id) if type(session_id) is str else None
        if session is not None and (session.owner == context.caller.name or context.caller.is_admin):
            session.last_used = self._time()
        return overloaded(context.waited_s)

    def _call_named(
        self, context: Context, session: BaseSession, op: str, fields: Mapping[str, Any]
    ) -> Reply | Awaitable[Reply]:
        """Run an operation of a named call; a cancellation by that name cancels this call only."""
        if type(session) is not LocalSession:
            return self._pass_on(context, session, op, fields)
        if op == "cancel" and session.call_id != context.call_id:
            return {}
        reply = self._on_session[op](context, session, fields)
        if isinstance(reply, dict) or op == "cancel":
            return reply
        return _named(session, context.call_id, reply)

    def _pass_on(
        self, context: Context, session: BaseSession, op: str, fields: Mapping[str, Any]
    ) -> Reply | Awaitable[Reply]:
        assert isinstance(session, RelayedSession)
        if op == "fork":
            return self._fork(context, session, fields)
        if op == "cancel":
            return self._relay.cancel(context, session, fields)
        return self._relay.call(context, session, op, fields)

    async def _later(
        self, context: Context, op: str, fields: Mapping[str, Any], began: float, reply: Any
    ) -> Reply:
        try:
            answer: Reply = await reply
        except ProblemError as problem:
            self._count_problem(context, op, fields, problem)
            raise
        except asyncio.CancelledError as error:
            if is_given_up():
                raise
            raise self._defect(context, op, fields, error) from error
        except Exception as error:
            raise self._defect(context, op, fields, error) from error
        if not context.forwarded:
            self._answered[op] += 1
            self._seconds[op].add(time.perf_counter() - began)
        return answer

    def _count_problem(
        self, context: Context, op: str, fields: Mapping[str, Any], problem: ProblemError
    ) -> None:
        _log.debug("%s is answered %s", op, problem.code, extra=log_fields(fields))
        # An unknown operation must not become a label.
        if not context.forwarded and problem.code != "unknown_op":
            self._metrics.operation_failed(op, problem)

    def _defect(
        self, context: Context, op: str, fields: Mapping[str, Any], error: BaseException
    ) -> ProblemError:
        """The problem that answers an internal error of the server; its log has the traceback."""
        _log.error("%s failed inside the server", op, exc_info=error, extra=log_fields(fields))
        problem = ProblemError("internal", "the server failed; its log says more")
        self._count_problem(context, op, fields, problem)
        return problem

    def _find(self, context: Context, op: str, fields: Mapping[str, Any]) -> BaseSession | None:
        """The session that a call is on, if this process holds it and the caller may use it."""
        if not context.forwarded:
            self._rate.take(context.caller)
        session_id = fields.get("session_id")
        if type(session_id) is not str:
            raise invalid("session_id", "a session id is needed, as text")
        session = self._by_id.get(session_id)
        if session is None or (session.owner != context.caller.name and not context.caller.is_admin):
            return None
        if op != "session":
            # To look is not to use.
            session.last_used = self._time()
        socket = context.socket
        if socket is not None and socket not in session.sockets:
            session.use_from(socket)
            context.sessions.add(session_id)
        return session

    def end(self, context: Context, session_id: str) -> None:
        """Close a session that was made here for no longer than a call or a socket of another protocol.

        The client has not requested this operation, so it is neither counted nor rate-limited.
        """
        self._making.close(context, [session_id])

    def take_back(self, context: Context, reply: Reply) -> int:
        """Close the sessions that an answer has opened which cannot be sent, and count them."""
        return self._closing.take_back(context, reply)

    def _call_general(self, context: Context, op: str, fields: Mapping[str, Any]) -> Reply | Awaitable[Reply]:
        handler = self._general.get(op)
        if handler is None:
            raise unknown_op(op)
        if op != "ping":
            self._lifecycle.require_started()
        # To find a session is a part of the call that needs it.
        if not context.forwarded and op != FIND_NAMED:
            self._rate.take(context.caller)
        return handler(context, fields)

    def _absent(self, context: Context, op: str, fields: Mapping[str, Any]) -> Reply | Awaitable[Reply]:
        """A call on a session that this process does not hold."""
        session_id = fields["session_id"]
        if self._relay.may_adopt(session_id):
            return self._adopted(context, op, session_id, fields)
        owner = self._sessions.owner_of(session_id)
        if self._peers.is_elsewhere(owner):
            return self._peers.call(context, owner, op, fields)
        # Those of the journal are not here yet.
        self._lifecycle.require_started()
        self._sessions.get(session_id, context.caller)
        raise AssertionError("a session that is not held was found")

    async def _adopted(self, context: Context, op: str, session_id: str, fields: Mapping[str, Any]) -> Reply:
        """A call on a session at a node that this gateway has not passed calls on to yet."""
        reason = self._sessions.end_reason(session_id)
        if reason not in (None, "evicted"):
            self._sessions.refuse_ended(session_id, context.caller)
        try:
            await self._relay.adopt(context.caller, session_id)
        except ProblemError as problem:
            if problem.code == "session_gone":
                # Why it ended is better known here; one that was evicted here may live on through another gateway.
                self._sessions.refuse_ended(session_id, context.caller)
            raise
        reply = self.call(context, op, fields)
        return reply if isinstance(reply, dict) else await reply

    # -- operations of this class itself -------------------------------------------------------------------------

    async def _make(self, context: Context, fields: Mapping[str, Any]) -> Reply:
        self._lifecycle.require_open()
        owner = self._first_asked(context, "make", fields)
        if owner is not None:
            return await self._peers.call(context, owner, "make", fields)
        return await self._making.make(context, fields)

    async def _restore(self, context: Context, fields: Mapping[str, Any]) -> Reply:
        self._lifecycle.require_open()
        owner = self._first_asked(context, "restore", fields)
        if owner is not None:
            return await self._peers.call(context, owner, "restore", fields)
        return await self._making.restore(context, fields)

    async def _open_named(self, context: Context, fields: Mapping[str, Any]) -> Reply:
        self._lifecycle.require_open()
        return await self._by_name(OPEN_NAMED, self._names.open, context, fields)

    async def _by_name(
        self,
        op: str,
        handler: Callable[[Context, Mapping[str, Any]], Awaitable[Reply]],
        context: Context,
        fields: Mapping[str, Any],
    ) -> Reply:
        owner = self._names.owner_of(context, fields)
        if self._peers.is_elsewhere(owner):
            return await self._peers.call(context, owner, op, fields)
        return await handler(context, fields)

    def _run_code(self, context: Context, fields: Mapping[str, Any]) -> Awaitable[Reply]:
        self._lifecycle.require_open()
        return self._running_code.run_code(context, fields)

    def _first_asked(self, context: Context, op: str, fields: Mapping[str, Any]) -> int | None:
        """The other process that a request for sessions came to first, over another connection."""
        request_id = fields.get("request_id")
        if type(request_id) is not str or context.forwarded:
            return None
        return self._affinity.elsewhere(context.caller.name, op, request_id)

    def _fork(self, context: Context, session: BaseSession, fields: Mapping[str, Any]) -> Awaitable[Reply]:
        self._lifecycle.require_open()
        return self._making.fork(context, session, fields)

    def _episode(
        self, context: Context, session: LocalSession, fields: Mapping[str, Any]
    ) -> Reply | Awaitable[Reply]:
        refuse_fields(fields)
        journal, episode = session.journal, max(0, session.episode)
        if journal.steps < MANY_STEPS:
            return journal.portable(episode).in_json()
        # The session may take steps while it is written.
        reply = journal.portable(episode, digests=[]).in_json()
        return _with_digests(reply, journal.packed_digests())

    def _session(self, context: Context, session: LocalSession, fields: Mapping[str, Any]) -> Reply:
        refuse_fields(fields)
        return session.describe(self._time())


async def _named(session: BaseSession, call_id: str | None, reply: Awaitable[Reply]) -> Reply:
    """Wait for the answer to a call, which can be cancelled by its id in the meantime."""
    session.call_id = call_id
    try:
        return await reply
    finally:
        if session.call_id == call_id:
            session.call_id = None


async def _with_digests(episode: Reply, packed: bytes) -> Reply:
    """A portable episode with its digests, of which there are many."""
    slices, size = Slices(), MANY_STEPS * DIGEST_BYTES
    for at in range(0, len(packed), size):
        await slices.turn()
        episode["digests"] += unpacked(packed[at : at + size])
    return episode


def unknown_op(op: Any) -> ProblemError:
    """The problem that no operation has this name, whatever value was sent as the name."""
    shown = repr(op[:_MAX_SHOWN]) if type(op) is str else type(op).__name__
    return ProblemError("unknown_op", f"there is no operation {shown}", known=sorted(SOCKET_OPS))


def _cancel(context: Context, session: LocalSession, fields: Mapping[str, Any]) -> Reply:
    """Give the running operation up; the session can be reset or closed."""
    refuse_fields(fields)
    if session.running is not None:
        session.running.task.cancel()
    return {}


def _ping(context: Context, fields: Mapping[str, Any]) -> Reply:
    refuse_fields(fields)
    return {}
