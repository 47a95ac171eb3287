"""Problems: the one set of error codes, as RFC 9457 objects and as an exception."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from rollgym.clients.protocol.problems import PROBLEMS, codes_of

CODES: Mapping[str, int] = MappingProxyType({problem.code: problem.status for problem in PROBLEMS})
"""Every problem code of the protocol with its HTTP status."""

RETRY_LATER = codes_of(lambda problem: problem.retry_later)
"""Codes that say: nothing was done, the same request may succeed after `retry_after` seconds."""

GONE = codes_of(lambda problem: problem.session_is_gone)
"""Codes that say that the server does not have the session, or not any more."""

_KINDS = {problem.code: problem for problem in PROBLEMS}
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
        if not _is_time(extra.get("retry_after", 0)):
            del extra["retry_after"]
        if not isinstance(extra.get("reason", ""), str):
            del extra["reason"]
        if isinstance(code, str) and code in CODES:
            return cls(code, detail, **extra)
        return cls("internal", detail, **(extra | {"unknown_code": code}))


def _is_time(value: Any) -> bool:
    # An integer may be larger than any float.
    return type(value) in (int, float) and 0 <= value <= sys.float_info.max


def _rebuild(code: str, detail: str, extra: dict[str, Any]) -> ProblemError:
    return ProblemError(code, detail, **extra)
