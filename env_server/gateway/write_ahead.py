"""Write-ahead: clients receive the answers of nodes once the journal that gateways share has recorded them."""

import secrets
from collections import OrderedDict
from collections.abc import Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from rollgym.clients.protocol.errors import ProblemError
from rollgym.env_server.gateway.in_flight import InFlight
from rollgym.env_server.gateway.journal_entries import (
    ENDED,
    Arguments,
    JournalAway,
    SharedSession,
    Write,
    check,
    not_known,
    place_after,
)
from rollgym.env_server.gateway.relayed_session import UNREADABLE
from rollgym.env_server.sessions.journal import END_REASONS, EndReason
from rollgym.env_server.sessions.replies import Reply
from rollgym.env_server.sessions.sessions import Sessions, session_gone

if TYPE_CHECKING:
    from rollgym.env_server.gateway.shared_journal import SharedJournal


_CLAIM_BYTES = 8
# Other gateways may move a session each time that it is looked for here.
_MOST_TRIES = 8


class Answering(Protocol):
    """Answers clients, and retries at nodes."""

    def finish(self, operation: InFlight, answer: Reply | ProblemError) -> None:
        """Send the answer to the client."""

    def recorded(self, operation: InFlight, answer: Reply | ProblemError) -> None:
        """Count what was done, and send the answer to the client."""

    def ask_again(self, operation: InFlight, *, gone: bool, after_s: float = 0.0) -> None:
        """Find the session and retry at its node; `gone` if the node does not have it as it was."""

    def spawn(self, operation: InFlight, body: Coroutine[Any, Any, None]) -> None:
        """Run a task that ends with the answer of an operation, or with its problem."""


class WriteAhead:
    """Sends the answers of nodes to clients once the journal has recorded them and confirmed the node.

    Args:
        journal: The journal.
        sessions: The open sessions, from which ended ones are removed.
        answering: Answers clients, and retries at nodes.
    """

    def __init__(self, journal: "SharedJournal", sessions: Sessions, answering: Answering) -> None:
        self._journal = journal
        self._sessions = sessions
        self._answering = answering
        # Each line ordered, and left in any order at the same cost.
        self._unnumbered: dict[str, OrderedDict[InFlight, None]] = {}

    def require(self) -> None:
        """Refuse operations that could not be recorded.

        Raises:
            ProblemError: `draining`.
        """
        self._journal.require()

    def confirm(
        self, operation: InFlight, answer: Reply | ProblemError, arguments: Arguments | None = None
    ) -> None:
        """Send an answer to the client, as soon as the journal has recorded it."""
        session = operation.session
        if arguments is None:
            arguments = check(operation.generation)
        done = partial(self._written, operation, answer, arguments)
        self._journal.write(Write(session.session_id, arguments, done))

    def refused(self, operation: InFlight, problem: ProblemError) -> None:
        """Send a problem to the client, if it comes from the node that holds the session."""
        if problem.code == "step_mismatch":
            self._answering.spawn(operation, self._mismatched(operation, problem))
        elif problem.code == "session_gone":
            self._answering.spawn(operation, self._ended(operation, problem))
        else:
            self.confirm(operation, problem)

    def number(self, operation: InFlight) -> None:
        """Send a step without an index on with the session's episode and step from the journal.

        They go one after another: the journal has the same place for all that come before the first is answered.
        """
        operation.waits = True
        operation.claim = secrets.token_hex(_CLAIM_BYTES)
        line = self._unnumbered.setdefault(operation.session.session_id, OrderedDict())
        line[operation] = None
        if len(line) == 1:
            self._answering.spawn(operation, self._number(operation))

    def finished(self, operation: InFlight) -> None:
        """Send the next step without an index on, once the first one is answered."""
        session_id = operation.session.session_id
        line = self._unnumbered.get(session_id)
        if line is None or operation not in line:
            return
        was_first = next(iter(line)) is operation
        del line[operation]
        if not line:
            del self._unnumbered[session_id]
        elif was_first:
            following = next(iter(line))
            self._answering.spawn(following, self._number(following))

    def _written(
        self, operation: InFlight, answer: Reply | ProblemError, arguments: Arguments, status: str
    ) -> None:
        if status == "ok":
            session = operation.session
            session.answered = max(session.answered, place_after(arguments))
            self._answering.recorded(operation, answer)
        elif status == "gap":
            operation.in_doubt = True
            self._answering.spawn(operation, self._fill(operation, answer, arguments))
        elif status in ("fenced", "moving", "behind"):
            # The session has moved or is about to, but may stay at its node; or the journal has another step where the
            # node has taken this one, or a later episode.
            operation.in_doubt = operation.in_doubt or not isinstance(answer, ProblemError)
            self._again(operation, gone=status == "behind")
        elif status == "taken":
            # Another gateway had an equal step for the same place at the same time: the answer is that of its step.
            self._answering.spawn(operation, self._number_again(operation))
        elif status == "unsure":
            self._answering.finish(operation, not_known("steps came through several gateways at once"))
        else:
            self._answering.finish(operation, self._refusal(operation, status))

    def _again(self, operation: InFlight, *, gone: bool) -> None:
        operation.tries += 1
        if operation.tries <= _MOST_TRIES:
            self._answering.ask_again(operation, gone=gone)
        else:
            problem = ProblemError("draining", "the session is moved from node to node", retry_after=1)
            self._answering.finish(operation, problem)

    def _refusal(self, operation: InFlight, status: str) -> ProblemError:
        """The problem that an answer could not be recorded."""
        session = operation.session
        if status == "missing" or status.startswith(ENDED):
            reason = _reason(status.removeprefix(ENDED))
            session.end_is_known = True
            self._sessions.end(session, reason)
            return session_gone(session.session_id, reason)
        away = JournalAway(status)
        return away.problem() if operation.may_be_repeated else away.not_known()

    async def _fill(self, operation: InFlight, answer: Reply | ProblemError, arguments: Arguments) -> None:
        """Write down the steps before this one, which a gateway took and did not live to write down."""
        status = await self._take_whole(operation)
        if status == "ok":
            status = await self._journal.written(operation.session.session_id, arguments)
        if status == "gap":
            status = "behind"
        self._written(operation, answer, arguments, status)

    async def _take_whole(self, operation: InFlight) -> str:
        session, generation = operation.session, operation.generation
        caller = session.node.link(False).caller
        fields = {"op": "episode", "session_id": operation.fields["session_id"]}
        try:
            reply = await caller.call(fields, session.process, caller.deadline())
            arguments = await session.note_episode(generation, reply.payload)
        except (ConnectionError, TimeoutError, ProblemError, *UNREADABLE):
            return "behind"
        return await self._journal.written(session.session_id, arguments)

    async def _mismatched(self, operation: InFlight, problem: ProblemError) -> None:
        """Find the cause of a step whose episode or index differs from the node's."""
        answered = operation.session.answered
        found = await self._load(operation)
        if found is None or found.ended is not None:
            reason = None if found is None else found.ended
            status = "missing" if reason is None else ENDED + reason
            self._answering.finish(operation, self._refusal(operation, status))
            return
        if found.generation != operation.generation or found.moving_s is not None:
            self._again(operation, gone=False)
            return
        place, known = _place(problem), max(found.place, found.answered, answered)
        if place is not None and place < known:
            self._again(operation, gone=True)
        elif operation.is_numbered_here and operation.in_doubt and place != _numbered(operation):
            self._answering.finish(operation, not_known("other steps were taken since it was sent"))
        elif place is not None and place > known and operation.is_numbered_here:
            # That step was never answered: a request without a step index continues from the session's present point.
            status = await self._take_whole(operation)
            if status == "ok":
                await self._number(operation)
            else:
                self._written(operation, problem, check(operation.generation), status)
        elif place == known and operation.is_numbered_here:
            # The session is busy with another step, or its episode broke off at this one. Its client named none, so it
            # has to be told that.
            operation.in_doubt = False
            del operation.fields["step"]
            if not operation.names_episode:
                del operation.fields["episode"]
            operation.is_numbered_here = False
            self._again(operation, gone=False)
        else:
            self._answering.finish(operation, problem)

    async def _ended(self, operation: InFlight, problem: ProblemError) -> None:
        """Look whether a session has ended of which a node says so, or lives elsewhere."""
        reason = _reason(problem.extra.get("reason"))
        session_id = operation.session.session_id
        try:
            ((status, _, _),) = await self._journal.end([session_id], reason, operation.generation)
        except JournalAway as away:
            raise away.problem() from away
        if status == "fenced":
            self._again(operation, gone=False)
        else:
            known = ENDED + reason if status == "ok" else status
            self._answering.finish(operation, self._refusal(operation, known))

    async def _load(self, operation: InFlight) -> SharedSession | None:
        try:
            return await self._journal.load(operation.session.session_id)
        except JournalAway as away:
            raise away.problem() from away

    async def _number(self, operation: InFlight) -> None:
        """Send a step that no node has taken yet on as the next one."""
        operation.in_doubt = False
        answered = operation.session.answered
        found = await self._load(operation)
        if found is not None and found.ended is None:
            # A journal that went back has a place whose step is answered: the node would repeat that answer. From the
            # place after it on, the node's episode fills the gap, or the session is lost if the node went back as well.
            episode, step = max(found.place, found.answered, answered)
            if episode >= 0:
                if not operation.names_episode:
                    operation.fields["episode"] = episode
                operation.fields["step"] = step
                operation.is_numbered_here = True
        self._again(operation, gone=False)

    async def _number_again(self, operation: InFlight) -> None:
        """Send a step on as the next one, which was not taken where it was sent; not without end."""
        operation.waits = True
        if operation.tries < _MOST_TRIES:
            await self._number(operation)
        else:
            problem = ProblemError("busy", "other steps are taken through other gateways", running="step")
            self._answering.finish(operation, problem)


def _reason(text: Any) -> EndReason:
    return next((reason for reason in END_REASONS if reason == text), "lost")


def _numbered(operation: InFlight) -> tuple[int, int]:
    return operation.fields["episode"], operation.fields["step"]


def _place(problem: ProblemError) -> tuple[int, int] | None:
    episode, step = problem.extra.get("episode"), problem.extra.get("step")
    if type(step) is not int or type(episode) not in (int, type(None)):
        return None
    return (-1 if episode is None else episode), step
