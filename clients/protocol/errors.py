"""Problems: every kind of failure of the protocol, declared once; as RFC 9457 objects and as an exception."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

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
        "(1,024 other items); the episode continues. A text is never refused",
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
        meaning="the environment cannot be copied, or cannot be given another seed",
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
        "broke off; a reset begins the next one",
    ),
    ProblemKind(
        code="step_timeout",
        status=504,
        fault="environment",
        told_to_agents=True,
        answers=("run", "make", "score"),
        meaning="no answer in time, or cancelled (`cancelled`); the episode broke off; a reset begins the next one",
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


CODES: Mapping[str, int] = MappingProxyType({problem.code: problem.status for problem in PROBLEMS})
"""Every problem code of the protocol with its HTTP status."""

RETRY_LATER = codes_of(lambda problem: problem.retry_later)
"""Codes that say: nothing was done, the same request may succeed after `retry_after` seconds."""

GONE = codes_of(lambda problem: problem.session_is_gone)
"""Codes that say that the server does not have the session, or not any more."""

_KINDS = {problem.code: problem for problem in PROBLEMS}
_LONGEST_DELAY_S = 86_400
_STANDARD_MEMBERS = frozenset({"type", "title", "status", "code", "detail"})


class ProblemError(Exception):
    """A documented failure of the protocol.

    Args:
        code: One of `CODES`.
        detail: A sentence for people about this occurrence.
        **extra: Further members of the problem object, such as `reason`, `errors` or `retry_after`.

    Attributes:
        kind: The properties of all problems with this code.

    Raises:
        ValueError: The code is not one of the protocol's, or an extra member hides a standard one.
    """

    def __init__(self, code: str, detail: str, /, **extra: Any) -> None:
        if code not in CODES:
            raise ValueError(f"unknown problem code {code!r}")
        if not _STANDARD_MEMBERS.isdisjoint(extra):
            raise ValueError(f"extra members hide standard ones: {sorted(_STANDARD_MEMBERS & set(extra))}")
        super().__init__(code, detail)
        self.code = code
        self.kind = _KINDS[code]
        self.detail = detail
        self.extra = extra

    @property
    def status(self) -> int:
        """The HTTP status of the problem."""
        return self.kind.status

    def __str__(self) -> str:
        return f"{self.code}: {self.detail}"

    def __reduce__(self) -> tuple[Any, ...]:
        # The default rebuilds from `args` and would lose the extra members on the way between processes.
        return _rebuild, (self.code, self.detail, self.extra)

    def to_problem(self) -> dict[str, Any]:
        """Return the RFC 9457 object that goes over the wire."""
        return {
            "type": f"urn:rollgym:problem:{self.code}",
            "title": self.code.replace("_", " ").capitalize(),
            "status": self.status,
            "code": self.code,
            "detail": self.detail,
            **self.extra,
        }

    @classmethod
    def from_problem(cls, problem: Any) -> ProblemError:
        """Read a problem object; an unknown code of a newer server becomes `internal`.

        An invalid `retry_after`, and a `reason` that is not a text, are left out.
        """
        if not isinstance(problem, Mapping):
            return cls("internal", "what was answered is no problem object")
        code, detail = problem.get("code"), problem.get("detail", "")
        if not isinstance(detail, str):
            # Anything may stand there, nested deeper than Python can show.
            detail = str(detail) if isinstance(detail, int | float) else ""
        extra = {str(key): value for key, value in problem.items() if key not in _STANDARD_MEMBERS}
        if not _is_delay(extra.get("retry_after", 0)):
            del extra["retry_after"]
        if not isinstance(extra.get("reason", ""), str):
            del extra["reason"]
        if isinstance(code, str) and code in CODES:
            return cls(code, detail, **extra)
        return cls("internal", detail, **(extra | {"unknown_code": code}))


def _is_delay(value: Any) -> bool:
    """Whether it is a time to wait, in seconds, that somebody may have meant."""
    return type(value) in (int, float) and 0 <= value <= _LONGEST_DELAY_S


def _rebuild(code: str, detail: str, extra: dict[str, Any]) -> ProblemError:
    return ProblemError(code, detail, **extra)
