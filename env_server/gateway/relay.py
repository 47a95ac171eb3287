"""Passing operations on to the nodes that have the sessions: envelopes are rewritten, values pass unchanged.

This is the hot path of a gateway. An operation costs no task and no future here; only an operation whose node is away
gets a task, which finds the session and retries.
"""

import asyncio
import itertools
import time
from collections.abc import Coroutine, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from rollgym.clients.protocol.errors import ProblemError
from rollgym.env_server.access.context import Context
from rollgym.env_server.access.tokens import Caller
from rollgym.env_server.gateway.journal_entries import Arguments, JournalAway, not_known
from rollgym.env_server.gateway.relayed_session import UNREADABLE, RelayedSession
from rollgym.env_server.gateway.relocation import PATIENCE_S, Relocation, renamed
from rollgym.env_server.gateway.session_names import parse_session_name
from rollgym.env_server.gateway.upstream.link import Passage
from rollgym.env_server.gateway.write_ahead import WriteAhead
from rollgym.env_server.journal.journal import END_REASONS
from rollgym.env_server.messages.envelope import as_problem
from rollgym.env_server.sessions.replies import Reply
from rollgym.env_server.sessions.sessions import Sessions
from rollgym.env_server.telemetry.logs import CURRENT_TRACE
from rollgym.env_server.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from rollgym.env_server.gateway.shared_journal import SharedJournal

_RETRY_S = 1.0
_FIRST_PAUSE_S = 0.05
_PROTOCOL = "rollgym"


class Relay:
    """The handlers of operations on sessions at nodes.

    Args:
        sessions: The open sessions.
        relocation: Finds sessions again.
        metrics: Counts steps.
        journal: The journal that gateways share, if there is one.
        is_gateway: Whether there can be any.
    """

    def __init__(
        self,
        sessions: Sessions,
        relocation: Relocation,
        metrics: Metrics,
        journal: "SharedJournal | None",
        *,
        is_gateway: bool,
    ) -> None:
        self._is_gateway = is_gateway
        self._journal = journal
        self._write_ahead = None if journal is None else WriteAhead(journal, sessions, self)
        self._sessions = sessions
        self._relocation = relocation
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._running: set[asyncio.Task[None]] = set()

    def call(
        self, context: Context, session: RelayedSession, op: str, fields: Mapping[str, Any]
    ) -> "InFlight":
        """Pass an operation on to the session's node.

        Raises:
            ProblemError: `draining`, if the shared journal is away, or `upstream_error` to a step without an index, if
                only the journal could show whether the node's copy is outdated.
        """
        write_ahead = self._write_ahead
        if write_ahead is not None:
            write_ahead.require()
        elif not session.is_proven and op == "step" and fields.get("step") is None:
            raise not_known("the session may have gone on elsewhere before this gateway was started anew")
        passed = dict(fields)
        passed.pop("id", None)
        passed["op"] = op
        passed["session_id"] = session.upstream_id
        binary = context.binary
        trace = CURRENT_TRACE.get()
        if trace is not None:
            passed["traceparent"] = trace
        if op == "reset" and "request_id" not in passed:
            passed["request_id"] = session.node.link(binary).caller.new_request_id()
        operation = InFlight(self, session, op, passed, binary)
        session.in_flight += 1
        if write_ahead is not None and not operation.is_safe_to_repeat:
            write_ahead.number(operation)
        elif not session.is_placed or (op != "cancel" and session.lock is not None and session.lock.locked()):
            # A cancel must not wait for the operation that it cancels.
            self.ask_again(operation, gone=False)
        else:
            session.node.link(binary).send(operation)
        return operation

    def may_adopt(self, session_id: str) -> bool:
        """Whether an id is that of a session at a node."""
        return self._is_gateway and parse_session_name(session_id) is not None

    async def adopt(self, caller: Caller, session_id: str) -> None:
        """Take in a session at a node that this gateway has not passed operations on to yet.

        Raises:
            ProblemError: `unknown_session`, `session_gone`, or `draining` while its node is not registered.
        """
        await self._relocation.adopt(caller, session_id)

    def close_unseen(self, caller: Caller, session_ids: Sequence[str]) -> int:
        """End sessions that this gateway has not passed operations on to, and count them."""
        return sum(self._relocation.close(caller, session_id) for session_id in session_ids)

    @property
    def shares_a_journal(self) -> bool:
        """Whether sessions are ended in a journal that gateways share, which takes time."""
        return self._journal is not None

    async def close_shared(self, caller: Caller, session_ids: Sequence[str]) -> int:
        """End sessions of the caller's for all gateways, and count them.

        Raises:
            ProblemError: `draining`, if it is unknown whether they have ended.
        """
        assert self._journal is not None
        own = [each for each in session_ids if self._relocation.is_of(caller, each)]
        if not own:
            return 0
        try:
            ends = await self._journal.end(own, "closed")
        except JournalAway as away:
            raise away.problem() from away
        for session_id, (status, node, upstream_id) in zip(own, ends, strict=True):
            session = self._sessions.by_id.get(session_id)
            if isinstance(session, RelayedSession):
                session.end_is_known = True
                self._sessions.end(session, "closed")
            if status == "ok":
                self._relocation.close_at(node, upstream_id)
        return sum(status == "ok" for status, _, _ in ends)

    async def idle(self, patience_s: float) -> None:
        """Wait until nothing is on its way."""
        sessions = self._sessions.by_id.values()
        waiting = [
            self._loop.create_task(session.quiet())
            for session in sessions
            if isinstance(session, RelayedSession) and session.is_busy
        ]
        if waiting:
            _, late = await asyncio.wait(waiting, timeout=patience_s)
            for task in late:
                task.cancel()

    async def shutdown(self) -> None:
        """Cancel the operations in flight."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    # -- answers -------------------------------------------------------------------------------------------------

    def answered(self, operation: "InFlight", reply: Reply) -> None:
        """Take a node's answer down, and pass it on."""
        session = operation.session
        op = operation.op
        if type(reply) is not dict:
            kind = type(reply).__name__
            self.finish(operation, ProblemError("upstream_error", f"{op} is answered with {kind}"))
            return
        noted: Arguments | None = None
        try:
            if self._write_ahead is not None:
                noted = session.note(op, operation.generation, operation.fields, reply, operation.binary)
            elif op == "step":
                session.take_step(operation.fields, reply, operation.binary)
            elif op == "reset" and not operation.fields.get("again"):
                session.take_reset(operation.fields, reply, operation.binary)
            if op == "step":
                session.is_proven = True
                self.count_step(session, reply)
            elif op == "reset" and not operation.fields.get("again"):
                session.is_proven = True
                self._metrics.resets[session.entry.label] += 1
            elif op == "episode":
                reply = {**reply, "env_id": session.entry.env_id}
            elif op == "session":
                reply = {
                    **reply,
                    "session_id": session.session_id,
                    "env_id": session.entry.env_id,
                    "owner": session.owner,
                }
        except UNREADABLE as error:
            self.finish(operation, ProblemError("upstream_error", f"the answer cannot be read: {error!r}"))
            return
        if session.incomplete:
            self.learn(session)
        if noted is None:
            self.finish(operation, reply)
        else:
            assert self._write_ahead is not None
            self._write_ahead.confirm(operation, reply, noted)

    def count_step(self, session: RelayedSession, reply: Reply) -> None:
        """Count a step that was taken."""
        label = session.entry.label
        self._metrics.steps[label] += 1
        if reply["terminated"] or reply["truncated"]:
            self._metrics.episode_finished(label, reply["info"], terminated=reply["terminated"])
            if "reset" in reply:
                self._metrics.resets[label] += 1

    def count_batch(self, steps: int, seconds: float) -> None:
        """Count steps that were answered together."""
        self._metrics.answered["step"] += steps
        self._metrics.seconds["step"].add(seconds, steps)
        self._metrics.upstream_seconds["step", _PROTOCOL].add(seconds, steps)

    def learn(self, session: RelayedSession) -> None:
        """Start to look up the steps of a session that went through other gateways."""
        if session.entry.deterministic:
            self._start(self._ask_for_steps(session))

    def refused(self, operation: "InFlight", problem: ProblemError) -> None:
        """Pass a node's problem on, or look for the session if that is the problem."""
        session = operation.session
        code = problem.code
        if code == "unknown_session" or (code == "session_gone" and problem.extra.get("reason") == "lost"):
            if self._sessions.by_id.get(session.session_id) is session:
                self.ask_again(operation, gone=True)
                return
        elif code == "draining":
            self.ask_again(operation, gone=False, after_s=_time_to_wait(problem))
            return
        elif code == "session_gone" and self._write_ahead is None:
            reason = problem.extra.get("reason")
            self._sessions.end(session, reason if reason in END_REASONS else "lost")
        problem = renamed(problem, str(operation.fields["session_id"]), session.session_id)
        if self._write_ahead is None:
            self.finish(operation, problem)
        else:
            self._write_ahead.refused(operation, problem)

    def lost(self, operation: "InFlight", error: Exception, *, sent: bool) -> None:
        """Retry an operation that a broken connection may have lost."""
        self._metrics.upstream_errors[operation.session.entry.label, _PROTOCOL] += 1
        if sent and not operation.is_safe_to_repeat:
            self.finish(operation, not_known(error))
        else:
            self.ask_again(operation, gone=False)

    def finish(self, operation: "InFlight", answer: "Reply | ProblemError") -> None:
        """Send the answer to the client and count the operation."""
        op = operation.op
        if isinstance(answer, ProblemError):
            self._metrics.operation_failed(op, answer)
        else:
            seconds = time.perf_counter() - operation.began
            self._metrics.answered[op] += 1
            self._metrics.seconds[op].add(seconds)
            self._metrics.upstream_seconds[op, _PROTOCOL].add(seconds)
        operation.session.landed()
        operation.answer(answer)

    # -- sessions that have to be found first --------------------------------------------------------------------

    def ask_again(self, operation: "InFlight", *, gone: bool, after_s: float = 0.0) -> None:
        """Look for the session and ask its node again; `gone` where the node does not have it as it was."""
        self.spawn(operation, self._find_and_ask(operation, gone, after_s))

    async def _find_and_ask(self, operation: "InFlight", gone: bool, after_s: float) -> None:
        """Retry at the node, once it is known to answer and to have the session."""
        session = operation.session
        deadline = self._loop.time() + PATIENCE_S
        if session.lock is None:
            session.lock = asyncio.Lock()
        async with session.lock:
            if operation.fields["session_id"] == session.upstream_id:
                await asyncio.sleep(after_s)
                if operation.op == "step" and session.lacks_steps_before(operation.fields):
                    session.incomplete = True
                await self._relocation.bring_back(
                    session, gone=gone, deadline=deadline, binary=operation.binary
                )
            await self._ask(operation, deadline)

    async def _ask(self, operation: "InFlight", deadline: float) -> None:
        session = operation.session
        for attempt in itertools.count():
            operation.fields["session_id"] = session.upstream_id
            operation.generation = session.generation
            gone = False
            try:
                reply = await session.node.link(operation.binary).ask(operation.fields, session.process)
            except ProblemError as problem:
                gone = problem.code == "unknown_session"
                if not (gone or problem.code == "draining") or self._loop.time() >= deadline:
                    self._refuse_found(operation, problem)
                    return
                if not gone:
                    await asyncio.sleep(_time_to_wait(problem))
            except (ConnectionError, TimeoutError) as error:
                if not operation.is_safe_to_repeat:
                    raise not_known(error) from error
                if self._loop.time() >= deadline:
                    raise ProblemError("upstream_error", str(error)) from error
                # A call that breaks at once would break again at once, and repeated retries would block the loop.
                await asyncio.sleep(_pause_s(attempt))
            else:
                self.answered(operation, reply)
                return
            await self._relocation.bring_back(session, gone=gone, deadline=deadline, binary=operation.binary)

    def _refuse_found(self, operation: "InFlight", problem: ProblemError) -> None:
        if problem.code == "unknown_session":
            problem = ProblemError("upstream_error", "the node forgets the session each time")
        session = operation.session
        problem = renamed(problem, session.upstream_id, session.session_id)
        if self._write_ahead is None or problem.code in ("upstream_error", "draining"):
            self.finish(operation, problem)
        else:
            self._write_ahead.refused(operation, problem)

    async def _ask_for_steps(self, session: RelayedSession) -> None:
        """Request the steps that went through other gateways from the node."""
        session.incomplete = False
        caller = session.node.link(False).caller
        fields = {"op": "episode", "session_id": session.upstream_id}
        try:
            reply = await caller.call(fields, session.process, caller.deadline())
            await session.take_episode(reply.payload)
        except (ConnectionError, TimeoutError, ProblemError, *UNREADABLE):
            session.incomplete = True

    def spawn(self, operation: "InFlight", body: Coroutine[Any, Any, None]) -> None:
        """Run a task that ends with the answer of an operation, or with its problem."""
        self._start(body).add_done_callback(partial(self._spawned, operation))

    def _spawned(self, operation: "InFlight", task: asyncio.Task[None]) -> None:
        if task.cancelled():
            going = ProblemError("draining", "the gateway is going away", retry_after=_RETRY_S)
            self.finish(operation, going)
        elif (error := task.exception()) is not None:
            assert isinstance(error, Exception)
            self.finish(operation, as_problem(error))

    def _start(self, body: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(body)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task


class InFlight(Passage):
    """An operation on a session, on its way to the node.

    Attributes:
        session: The session.
        op: The operation.
        binary: Whether it is in MessagePack.
        began: When it arrived, on the clock that times operations.
        generation: How often the session had been moved when its node was asked.
        tries: How often its session was found at another node than the one asked.
        is_numbered_here: Whether its episode and step come from the journal, and not from the client.
    """

    __slots__ = ("_relay", "began", "binary", "generation", "is_numbered_here", "op", "session", "tries")

    def __init__(
        self, relay: Relay, session: RelayedSession, op: str, fields: dict[str, Any], binary: bool
    ) -> None:
        super().__init__(fields, session.process, session.shares_frames)
        self._relay = relay
        self.session = session
        self.op = op
        self.binary = binary
        self.began = time.perf_counter()
        self.generation = session.generation
        self.tries = 0
        self.is_numbered_here = False

    def answered(self, reply: Any) -> None:
        """Pass the node's answer on."""
        self._relay.answered(self, reply)

    def refused(self, problem: ProblemError) -> None:
        """Pass the node's problem on."""
        self._relay.refused(self, problem)

    def lost(self, error: Exception, *, sent: bool) -> None:
        """Note that no answer will come."""
        self._relay.lost(self, error, sent=sent)

    @property
    def is_safe_to_repeat(self) -> bool:
        """Whether the node knows it again."""
        return self.op != "step" or self.fields.get("step") is not None


def _pause_s(attempt: int) -> float:
    """The delay in seconds before a retry at a node, by the number of broken connections so far."""
    return min(_RETRY_S, _FIRST_PAUSE_S * 2.0 ** min(attempt - 1, 16)) if attempt else 0.0


def _time_to_wait(problem: ProblemError) -> float:
    return min(PATIENCE_S, float(problem.extra.get("retry_after", _RETRY_S)))
