"""Passing operations on to the nodes that have the sessions: envelopes are rewritten, values pass unchanged.

This is the hot path of a gateway. An operation costs no task and no future here; only an operation whose node is away
gets a task, which finds the session and retries. Where gateways share a journal, it records the answers of nodes before
clients receive them.
"""

import asyncio
import itertools
import time
from collections.abc import Coroutine, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from rollgym.clients.protocol.errors import ProblemError
from rollgym.clients.protocol.upstream_protocols import ROLLGYM
from rollgym.env_server.access.context import Context
from rollgym.env_server.access.tokens import Caller
from rollgym.env_server.common.event_loop import Slices
from rollgym.env_server.common.logs import CURRENT_TRACE
from rollgym.env_server.common.metrics import Metrics
from rollgym.env_server.common.requests import as_problem, refuse_fields
from rollgym.env_server.gateway.adoption import Adoption
from rollgym.env_server.gateway.in_flight import InFlight
from rollgym.env_server.gateway.journal_entries import ENDED, Arguments, JournalAway, not_known
from rollgym.env_server.gateway.moves import parse_session_name
from rollgym.env_server.gateway.registry import PATIENCE_S
from rollgym.env_server.gateway.relayed_session import UNREADABLE, RelayedSession, renamed
from rollgym.env_server.gateway.relocation import Relocation
from rollgym.env_server.gateway.write_ahead import WriteAhead
from rollgym.env_server.sessions.journal import END_REASONS
from rollgym.env_server.sessions.replies import Reply
from rollgym.env_server.sessions.sessions import Sessions

if TYPE_CHECKING:
    from rollgym.env_server.gateway.shared_journal import SharedJournal


_RETRY_S = 1.0
_FIRST_PAUSE_S = 0.05
_PROTOCOL = ROLLGYM.name
# A cancel must not wait for the operation that it cancels, nor a look at the session, which some protocols take first.
_NOT_IN_TURN = frozenset({"cancel", "session"})
# What a node cancels; the others change nothing.
_CANCELLED = frozenset({"step", "reset", "render"})


class Relay:
    """The handlers of operations on sessions at nodes.

    Args:
        sessions: The open sessions.
        relocation: Finds sessions again.
        adoption: Finds sessions that it has not seen.
        metrics: Counts steps.
        journal: The journal that gateways share, if there is one.
        is_gateway: Whether there can be any.

    Attributes:
        is_going: Whether it passes nothing on any more.
    """

    def __init__(
        self,
        sessions: Sessions,
        relocation: Relocation,
        adoption: Adoption,
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
        self._adoption = adoption
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._running: set[asyncio.Task[None]] = set()
        self.is_going = False

    def call(self, context: Context, session: RelayedSession, op: str, fields: Mapping[str, Any]) -> InFlight:
        """Pass an operation on to the session's node.

        Raises:
            ProblemError: `draining`, if the shared journal is away or this gateway is going away; `upstream_error` to a
                step without an index, if only the journal could show whether the node's copy is outdated.
        """
        if self.is_going:
            raise _going_away()
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
        operation = InFlight(self, session, op, passed, binary, context.call_id)
        session.in_flight += 1
        if write_ahead is not None and not operation.is_safe_to_repeat and session.entry.deterministic:
            # Of others, the journal counts the episodes alone: their steps go to the node as they came.
            write_ahead.number(operation)
        elif not session.is_placed or (
            op not in _NOT_IN_TURN and session.lock is not None and session.lock.locked()
        ):
            self.ask_again(operation, gone=False)
        else:
            session.node.link(binary).send(operation)
        return operation

    def cancel(
        self, context: Context, session: RelayedSession, fields: Mapping[str, Any]
    ) -> InFlight | Reply:
        """Pass a cancellation on. What no node has yet ends here, and so does what its node does not answer.

        A cancellation by the name of a call concerns this call alone.

        Raises:
            ProblemError: `invalid_request`, or `draining` if the shared journal is away.
        """
        refuse_fields(fields)
        if self._write_ahead is not None:
            self._write_ahead.require()
        named = context.call_id
        at_node = named is None
        if named is None:
            # For a step in a batch, which has no object of its own yet. No call of a name is passed on in one.
            session.cancelled_at = time.perf_counter()
        waiting: list[InFlight] = []
        for operation in session.underway:
            assert isinstance(operation, InFlight)
            if operation.op not in _CANCELLED or named not in (None, operation.call_id):
                continue
            operation.is_cancelled = True
            if operation.waits:
                waiting.append(operation)
            else:
                at_node = True
        if waiting:
            # The last first: the end of a step without an index starts the next one in its line.
            self._start(self._end_waiting(waiting[::-1]))
        return self.call(context, session, "cancel", fields) if at_node else {}

    def may_adopt(self, session_id: str) -> bool:
        """Whether an id is that of a session at a node."""
        return self._is_gateway and parse_session_name(session_id) is not None

    async def adopt(self, caller: Caller, session_id: str) -> None:
        """Take in a session at a node that this gateway has not passed operations on to yet.

        Raises:
            ProblemError: `unknown_session`, `session_gone`, or `draining` while its node is not registered.
        """
        await self._adoption.adopt(caller, session_id)

    def close_unseen(self, caller: Caller, session_ids: Sequence[str]) -> int:
        """End sessions that this gateway has not passed operations on to, and count them."""
        return sum(self._adoption.close(caller, session_id) for session_id in session_ids)

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
        own = [each for each in session_ids if self._adoption.is_of(caller, each)]
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
            if status == "ok" or status.startswith(ENDED):
                # Who wrote an end down that is known already may not have lived to tell the node.
                self._adoption.close_at(node, upstream_id)
        return sum(status == "ok" for status, _, _ in ends)

    async def idle(self, patience_s: float) -> None:
        """Wait until nothing is on its way; then answer what still is, and pass nothing on any more.

        Steps without an index that a node may have taken are answered that this is not known. Of others, their clients
        need to know no more than that this gateway is going away: nothing was done, or they are safe to repeat.
        """
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
        self.is_going = True
        for session in sessions:
            # The last first: the end of a step without an index starts the next one in its line.
            operations = list(session.underway)[::-1] if isinstance(session, RelayedSession) else ()
            for operation in operations:
                assert isinstance(operation, InFlight)
                self.give_up(operation)
        # None of them may still send what was answered so.
        for running in self._running:
            running.cancel()

    async def shutdown(self) -> None:
        """Cancel the operations in flight."""
        # The end of a step starts the next one in its line.
        while self._running:
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)

    # -- answers -------------------------------------------------------------------------------------------------

    def answered(self, operation: InFlight, reply: Reply) -> None:
        """Take a node's answer down, and pass it on."""
        session = operation.session
        op = operation.op
        noted: Arguments | None = None
        try:
            if type(reply) is not dict:
                raise TypeError(f"{op} is answered with {type(reply).__name__}")
            if self._write_ahead is not None:
                noted = session.note(
                    *(op, operation.generation, operation.fields, reply, operation.binary), operation.claim
                )
            elif op == "step":
                session.take_step(operation.fields, reply, operation.binary)
                session.is_proven = True
                self.count_step(session, reply)
            elif op == "reset" and not operation.fields.get("again"):
                session.take_reset(operation.fields, reply, operation.binary)
                session.is_proven = True
                self._metrics.resets[session.entry.label] += 1
            if op == "episode":
                reply = {**reply, "env_id": session.entry.env_id}
            elif op == "session":
                reply = {
                    **reply,
                    "session_id": session.session_id,
                    "env_id": session.entry.env_id,
                    "owner": session.owner,
                }
        except UNREADABLE as error:
            operation.in_doubt = True
            self.finish(operation, ProblemError("upstream_error", f"the answer cannot be read: {error!r}"))
            return
        if session.incomplete:
            self.learn(session)
        if noted is None:
            self.finish(operation, reply)
        else:
            assert self._write_ahead is not None
            self._write_ahead.confirm(operation, reply, noted)

    def recorded(self, operation: InFlight, answer: Reply | ProblemError) -> None:
        """Count what was done, and send the answer to the client: the journal has recorded it."""
        op, session = operation.op, operation.session
        if type(answer) is dict:
            try:
                if op == "step":
                    self.count_step(session, answer)
                elif op == "reset" and not operation.fields.get("again"):
                    self._metrics.resets[session.entry.label] += 1
            except UNREADABLE as error:
                answer = ProblemError("upstream_error", f"the answer cannot be read: {error!r}")
        self.finish(operation, answer)

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

    def refused(self, operation: InFlight, problem: ProblemError) -> None:
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
        elif code == "upstream_error":
            operation.in_doubt = True
        elif code == "session_gone" and self._write_ahead is None:
            reason = problem.extra.get("reason")
            self._sessions.end(session, reason if reason in END_REASONS else "lost")
        elif problem.extra.get("part") == "reply" and operation.op == "step" and self._write_ahead is None:
            # It was taken, and its answer is too large to be sent.
            self.learn(session)
        problem = renamed(problem, str(operation.fields["session_id"]), session.session_id)
        if self._write_ahead is None:
            self.finish(operation, problem)
        else:
            self._write_ahead.refused(operation, problem)

    def lost(self, operation: InFlight, error: Exception, *, sent: bool) -> None:
        """Retry an operation that a broken connection may have lost."""
        self._metrics.upstream_errors[operation.session.entry.label, _PROTOCOL] += 1
        if sent and not operation.is_safe_to_repeat:
            self.finish(operation, not_known(error))
        else:
            operation.in_doubt = operation.in_doubt or sent
            self.ask_again(operation, gone=False)

    def finish(self, operation: InFlight, answer: Reply | ProblemError) -> None:
        """Send the answer to the client and count the operation, unless it was answered already."""
        if operation not in operation.session.underway:
            return
        op = operation.op
        if isinstance(answer, ProblemError):
            answer = operation.as_told(answer)
            self._metrics.operation_failed(op, answer)
        else:
            seconds = time.perf_counter() - operation.began
            self._metrics.answered[op] += 1
            self._metrics.seconds[op].add(seconds)
            self._metrics.upstream_seconds[op, _PROTOCOL].add(seconds)
        del operation.session.underway[operation]
        operation.session.landed()
        if self._write_ahead is not None:
            self._write_ahead.finished(operation)
        operation.answer(answer)

    # -- sessions that have to be found first --------------------------------------------------------------------

    def ask_again(self, operation: InFlight, *, gone: bool, after_s: float = 0.0) -> None:
        """Look for the session and ask its node again; `gone` where the node does not have it as it was."""
        if operation.is_cancelled:
            self._end_cancelled(operation)
            return
        operation.waits = True
        if self.is_going:
            self.give_up(operation)
            return
        self.spawn(operation, self._find_and_ask(operation, gone, after_s))

    def give_up(self, operation: InFlight) -> None:
        """Answer an operation that this gateway does not live to see the end of."""
        operation.in_doubt = operation.in_doubt or not operation.waits
        self.finish(operation, _going_away())

    async def _end_waiting(self, operations: Sequence[InFlight]) -> None:
        """Answer cancelled operations that no node has; there may be any number of them."""
        slices = Slices()
        for operation in operations:
            await slices.turn()
            self._end_cancelled(operation)

    def _end_cancelled(self, operation: InFlight) -> None:
        """Answer a cancelled operation."""
        text = f"the {operation.op} was cancelled; reset the session"
        self.finish(operation, ProblemError("step_timeout", text, cancelled=True))

    async def _find_and_ask(self, operation: InFlight, gone: bool, after_s: float) -> None:
        """Retry at the node, once it is known to answer and to have the session."""
        session = operation.session
        deadline = self._loop.time() + PATIENCE_S
        if session.lock is None:
            session.lock = asyncio.Lock()
        async with session.lock:
            if operation.fields["session_id"] == session.upstream_id and not operation.is_cancelled:
                await asyncio.sleep(after_s)
                if operation.op == "step" and session.lacks_steps_before(operation.fields):
                    session.incomplete = True
                await self._relocation.bring_back(
                    session, gone=gone, deadline=deadline, binary=operation.binary
                )
            await self._ask(operation, deadline)

    async def _ask(self, operation: InFlight, deadline: float) -> None:
        session = operation.session
        for attempt in itertools.count():
            if operation.is_cancelled:
                self._end_cancelled(operation)
                return
            operation.waits = False
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
                operation.in_doubt = True
                if self._loop.time() >= deadline:
                    raise ProblemError("upstream_error", str(error)) from error
                # A call that breaks at once would break again at once, and repeated retries would block the loop.
                await asyncio.sleep(_pause_s(attempt))
            else:
                self.answered(operation, reply)
                return
            if not operation.is_cancelled:
                operation.waits = True
                await self._relocation.bring_back(
                    session, gone=gone, deadline=deadline, binary=operation.binary
                )

    def _refuse_found(self, operation: InFlight, problem: ProblemError) -> None:
        if problem.code == "unknown_session":
            problem = ProblemError("upstream_error", "the node forgets the session each time")
        elif problem.code == "upstream_error":
            operation.in_doubt = True
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

    def spawn(self, operation: InFlight, body: Coroutine[Any, Any, None]) -> None:
        """Run a task that ends with the answer of an operation, or with its problem."""
        self._start(body).add_done_callback(partial(self._spawned, operation))

    def _spawned(self, operation: InFlight, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            problem = _going_away()
        elif (error := task.exception()) is not None:
            assert isinstance(error, Exception)
            problem = as_problem(error)
        else:
            return
        self.finish(operation, problem)

    def _start(self, body: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(body)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task


def _going_away() -> ProblemError:
    return ProblemError("draining", "the gateway is going away", retry_after=_RETRY_S)


def _pause_s(attempt: int) -> float:
    """The delay in seconds before a retry at a node, by the number of broken connections so far."""
    return min(_RETRY_S, _FIRST_PAUSE_S * 2.0 ** min(attempt - 1, 16)) if attempt else 0.0


def _time_to_wait(problem: ProblemError) -> float:
    return min(PATIENCE_S, float(problem.extra.get("retry_after", _RETRY_S)))
