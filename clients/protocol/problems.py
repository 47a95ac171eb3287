"""Every kind of failure that the protocol knows, each declared once; lists of them are queries."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Fault = Literal["call", "values", "caller", "action", "state", "environment", "server"]
"""The cause of a failure: the target of a call (an operation, a path, a missing environment), the values of the call,
the caller, the action of a policy, the state of the server (a session elsewhere, a name in use), the environment, or
the server."""

Answers = Literal["any", "session", "run", "make", "score"]
"""The calls that it answers: any; those on a session; those that run an environment there; those that make one; those
that score responses without a session."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemKind:
    """A kind of failure.

    Attributes:
        code: The code that programs compare.
        status: Its HTTP status.
        fault: The cause: whose fault it is.
        meaning: When it is answered and with which further members, in Markdown: a row of the protocol's page.
        retry_later: The server did nothing, and the same request may succeed after `retry_after` seconds.
        told_to_agents: An agent that acts by tools receives it as the result of its call, since its next call may be
            right. All other problems go to its client.
        session_is_gone: The server has lost the session, or never had it.
        kept_from_clients: A gateway does not pass it on from its node: it concerns only the two of them.
        of_gateways: Only gateways send it.
        answers: The calls that it may answer, if they are too many for each description to name it.
    """

    code: str
    status: int
    fault: Fault
    meaning: str
    retry_later: bool = False
    told_to_agents: bool = False
    session_is_gone: bool = False
    kept_from_clients: bool = False
    of_gateways: bool = False
    answers: tuple[Answers, ...] = ()

    @property
    def is_final(self) -> bool:
        """Whether a retry of the same request gets the same problem, even in a new session: the request must change."""
        return self.fault in ("call", "values", "caller")

    @property
    def forbids_restoring(self) -> bool:
        """Whether an episode that a server answers so is restored by none, now or later."""
        return self.fault == "values" or self.code == "session_gone"


PROBLEMS = (
    ProblemKind(
        code="invalid_request",
        status=422,
        fault="values",
        told_to_agents=True,
        answers=("any",),
        meaning='the fields do not fit, in name, type (`"yes"` is no boolean, `true` no number) or range, or a reset '
        "names options that the environment does not have (`reset_options` in its `metadata`) or refuses (the episode "
        "before it is over); `errors: [{field, reason}]`",
    ),
    ProblemKind(code="unknown_op", status=422, fault="call", meaning="`known`"),
    ProblemKind(
        code="invalid_action",
        status=422,
        fault="action",
        told_to_agents=True,
        meaning="not in the action space, or with more than 32,768 numbers, texts or plain arrays in its sequences "
        "(1,024 other items); the episode goes on. A text is never refused",
    ),
    ProblemKind(
        code="invalid_kwargs",
        status=422,
        fault="values",
        answers=("make",),
        meaning="the schema, the operator or the environment's constructor refuses them; `errors`",
    ),
    ProblemKind(code="not_found", status=404, fault="call", meaning="no such path"),
    ProblemKind(
        code="method_not_allowed",
        status=405,
        fault="call",
        meaning="the path has other methods: `allow`, and the header `Allow`",
    ),
    ProblemKind(
        code="unknown_env", status=404, fault="call", answers=("score",), meaning="`suggestions`: near names"
    ),
    ProblemKind(
        code="unknown_session",
        status=404,
        fault="state",
        session_is_gone=True,
        answers=("session",),
        meaning="not there, or not the caller's",
    ),
    ProblemKind(
        code="session_gone",
        status=410,
        fault="state",
        session_is_gone=True,
        answers=("session",),
        meaning="`reason`: `evicted`, `closed`, `lost` (its worker died and it cannot be rebuilt), `replay_diverged` "
        "(rebuilt, it was not the same)",
    ),
    ProblemKind(
        code="not_reset",
        status=409,
        fault="state",
        told_to_agents=True,
        answers=("run",),
        meaning="a step before the first reset, or after an episode broke off; a `fork` with `reseed` before the first "
        "reset",
    ),
    ProblemKind(
        code="episode_over", status=409, fault="state", told_to_agents=True, meaning="a step after the end"
    ),
    ProblemKind(
        code="step_mismatch", status=409, fault="state", meaning="`episode`, `step`: where the session is"
    ),
    ProblemKind(
        code="request_mismatch",
        status=409,
        fault="state",
        answers=("make",),
        meaning="the `request_id` of a make, fork or restore was already used with other fields",
    ),
    ProblemKind(
        code="busy",
        status=409,
        fault="state",
        told_to_agents=True,
        answers=("run",),
        meaning="`running`: the operation that runs",
    ),
    ProblemKind(
        code="fork_unsupported",
        status=409,
        fault="call",
        meaning="the environment cannot be copied, or not seeded anew",
    ),
    ProblemKind(
        code="not_stateless",
        status=409,
        fault="call",
        answers=("score",),
        meaning="the environment scores no single responses",
    ),
    ProblemKind(
        code="unauthorized",
        status=401,
        fault="caller",
        kept_from_clients=True,
        answers=("any",),
        meaning="no token, or a wrong one",
    ),
    ProblemKind(
        code="forbidden",
        status=403,
        fault="caller",
        kept_from_clients=True,
        answers=("any",),
        meaning="not with this role, not on this server, or [not for a page of another "
        "site](server.md#web-pages-of-others)",
    ),
    ProblemKind(
        code="too_large",
        status=413,
        fault="values",
        answers=("any",),
        meaning='the request, the reply (`part: "reply"`: what was asked for was done), or an action that would make '
        "the episode longer than `limit` (it was not taken)",
    ),
    ProblemKind(
        code="unsupported_media_type",
        status=415,
        fault="call",
        answers=("any",),
        meaning="neither JSON nor MessagePack, or packed (`Content-Encoding`)",
    ),
    ProblemKind(
        code="rate_limited",
        status=429,
        fault="server",
        retry_later=True,
        answers=("any",),
        meaning="too many operations of this token in a second; nothing was done; `retry_after` seconds, and as "
        "`Retry-After`",
    ),
    ProblemKind(
        code="at_capacity",
        status=503,
        fault="server",
        retry_later=True,
        answers=("make",),
        meaning="no room for one more: `limit` names the setting; nothing was done; `retry_after`",
    ),
    ProblemKind(
        code="draining",
        status=503,
        fault="server",
        retry_later=True,
        answers=("session", "make", "score"),
        meaning="it ends when what runs is finished, or starts; nothing was done; `retry_after`",
    ),
    ProblemKind(
        code="overloaded",
        status=503,
        fault="server",
        retry_later=True,
        answers=("run", "make", "score"),
        meaning="it is [behind](fleet_operation.md#overload); nothing was done; `retry_after`",
    ),
    ProblemKind(
        code="env_error",
        status=500,
        fault="environment",
        told_to_agents=True,
        answers=("run", "make", "score"),
        meaning="the environment raised, or gave what has no form on the wire; `error_class`, `message`. The episode "
        "broke off; reset goes on",
    ),
    ProblemKind(
        code="step_timeout",
        status=504,
        fault="environment",
        told_to_agents=True,
        answers=("run", "make", "score"),
        meaning="no answer in time, or cancelled (`cancelled`); the episode broke off; reset goes on",
    ),
    ProblemKind(
        code="internal",
        status=500,
        fault="server",
        kept_from_clients=True,
        answers=("any",),
        meaning="an internal error of the server: please report it",
    ),
    ProblemKind(
        code="unknown_registration",
        status=404,
        fault="state",
        of_gateways=True,
        meaning="it expired, or is another token's: register again",
    ),
    ProblemKind(
        code="env_exists",
        status=409,
        fault="call",
        of_gateways=True,
        meaning="the id is that of an environment of the gateway's own",
    ),
    ProblemKind(
        code="spec_mismatch",
        status=409,
        fault="environment",
        of_gateways=True,
        meaning="`fields`: what a replica says otherwise than those that are registered",
    ),
    ProblemKind(
        code="probe_failed",
        status=422,
        fault="environment",
        of_gateways=True,
        meaning="`report`: `[{check, ok, detail}, ...]`",
    ),
    ProblemKind(
        code="upstream_error",
        status=502,
        fault="server",
        of_gateways=True,
        answers=("run", "make", "score"),
        meaning="a registered server failed, or none is there",
    ),
)
"""All of them, in the order of the protocol's page."""


def codes_of(is_meant: Callable[[ProblemKind], bool]) -> frozenset[str]:
    """Return the codes of the problems that are meant."""
    return frozenset(problem.code for problem in PROBLEMS if is_meant(problem))
