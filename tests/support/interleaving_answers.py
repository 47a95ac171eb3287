"""What questions are answered: a good answer, or a problem whose code is known, and nothing else."""

import json
from collections import Counter
from typing import Any

from rollgym.clients.protocol.errors import CODES


class Answers:
    """Looks at answers, and counts them.

    Attributes:
        codes: How often what was answered.
        faults: What should not have been answered.
    """

    def __init__(self) -> None:
        self.codes: Counter[str] = Counter()
        self.faults: list[str] = []

    def take_problem(self, problem: Any, what: str) -> None:
        """Look at a problem."""
        code = problem.get("code")
        self.codes[code] += 1
        if code not in CODES or code == "internal" or not problem.get("detail"):
            self.faults.append(f"{what} is answered {problem}")
        elif code == "overloaded" and not _is_whole(problem.get("retry_after")):
            self.faults.append(f"{what} is answered {problem}, which does not say when to come again")

    def read(self, found: tuple[int, dict[str, str], bytes], what: str) -> Any:
        """A good answer's body; None where there is none, or it is a problem."""
        status, headers, body = found
        kind = headers.get("content-type", "")
        if status == 204 and not body:
            self.codes["ok"] += 1
        elif kind == "application/problem+json":
            problem = json.loads(body)
            self.take_problem(problem, what)
            if headers.get("retry-after") != _as_header(problem.get("retry_after")):
                self.faults.append(f"{what} is answered {problem} with the headers {headers}")
        elif 200 <= status < 300 and kind == "application/json":
            return json.loads(body)
        else:
            self.faults.append(f"{what} is answered {status} {kind}: {body[:300]!r}")
        return None


def _is_whole(seconds: Any) -> bool:
    return type(seconds) is int and seconds >= 1


def _as_header(seconds: Any) -> str | None:
    return None if seconds is None else str(seconds)
