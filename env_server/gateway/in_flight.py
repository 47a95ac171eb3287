"""An operation in flight: what a gateway knows of a request that it has passed on to a node, or is about to."""

import time
from typing import Any, Protocol

from rollgym.clients.protocol.errors import ProblemError
from rollgym.env_server.gateway.journal_entries import not_known
from rollgym.env_server.gateway.relayed_session import RelayedSession
from rollgym.env_server.gateway.upstream.node import NodeOperation
from rollgym.env_server.sessions.replies import Reply

# The problems that leave open whether something was done.
_UNCERTAIN = frozenset({"draining", "upstream_error"})


class Outcomes(Protocol):
    """Handles what becomes of operations at their nodes."""

    def answered(self, operation: "InFlight", reply: Reply) -> None:
        """Handle the answer of the node."""

    def refused(self, operation: "InFlight", problem: ProblemError) -> None:
        """Handle the problem that the node answered."""

    def lost(self, operation: "InFlight", error: Exception, *, sent: bool) -> None:
        """Note that no answer will come; whether an operation that was sent was done is not known."""


class InFlight(NodeOperation):
    """An operation on a session, on its way to the node.

    Attributes:
        session: The session.
        op: The operation.
        binary: Whether it is in MessagePack.
        began: When it arrived, on the clock that times operations.
        generation: How often the session had been moved when its node was asked.
        tries: How often it was sent to a node for what the journal says: it was numbered, also for the first time, its
            session had moved or was about to, or the node differed from the journal.
        is_numbered_here: Whether its episode and step come from the journal, and not from the client.
        claim: By which the journal tells it from an equal step for the same place; empty if the client named the place.
        names_episode: Whether the client has named its episode.
        in_doubt: Whether a node may have taken it at the place that it has now, and the journal lacks that.
        call_id: The id that a client of another protocol gave to the call.
        waits: Whether it waits in this gateway, and no node has it.
        is_cancelled: Whether its client has cancelled it. No node is asked for it again; one that has it is told so.
    """

    __slots__ = (
        "_outcomes",
        "began",
        "binary",
        "call_id",
        "claim",
        "generation",
        "in_doubt",
        "is_cancelled",
        "is_numbered_here",
        "names_episode",
        "op",
        "session",
        "tries",
        "waits",
    )

    def __init__(
        self,
        outcomes: Outcomes,
        session: RelayedSession,
        op: str,
        fields: dict[str, Any],
        binary: bool,
        call_id: str | None = None,
    ) -> None:
        super().__init__(fields, session.process, session.shares_frames)
        self._outcomes = outcomes
        self.session = session
        self.op = op
        self.binary = binary
        self.began = time.perf_counter()
        self.generation = session.generation
        self.tries = 0
        self.is_numbered_here = False
        self.names_episode = fields.get("episode") is not None
        self.claim = ""
        self.in_doubt = False
        self.call_id = call_id
        self.waits = False
        self.is_cancelled = False
        session.underway[self] = None

    def answered(self, reply: Any) -> None:
        """Pass the node's answer on."""
        self._outcomes.answered(self, reply)

    def refused(self, problem: ProblemError) -> None:
        """Pass the node's problem on."""
        self._outcomes.refused(self, problem)

    def lost(self, error: Exception, *, sent: bool) -> None:
        """Note that no answer will come."""
        self._outcomes.lost(self, error, sent=sent)

    @property
    def is_safe_to_repeat(self) -> bool:
        """Whether the node knows it again."""
        return self.op != "step" or self.fields.get("step") is not None

    @property
    def may_be_repeated(self) -> bool:
        """Whether its client may send it again without it being done twice."""
        return self.is_safe_to_repeat and not self.is_numbered_here

    def as_told(self, problem: ProblemError) -> ProblemError:
        """A problem in place of its answer, as its client has to read it."""
        if problem.code in _UNCERTAIN and self.in_doubt and not self.may_be_repeated:
            # To a client that names no place, the one would say that nothing was done, and the other not what to do.
            return not_known(problem.detail)
        return problem
