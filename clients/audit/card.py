"""The report card: what was looked at, and how it came out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Verdict(Enum):
    """How one entry of the card came out."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    SKIPPED = "skipped"


_SEVERITY = {Verdict.SKIPPED: 0, Verdict.OK: 0, Verdict.WARNING: 1, Verdict.FAILED: 2}


@dataclass(frozen=True)
class Entry:
    """One line of the card.

    Attributes:
        section: What it is about: `determinism`, `baselines`, `leaks`, `rewards`, `conduct`, `verifier`, `difficulty`
            or `costs`.
        check: The question.
        verdict: How it came out.
        detail: What was seen, in a sentence with its numbers.
        remedy: What to do about it.
        numbers: What was measured, for programs.
    """

    section: str
    check: str
    verdict: Verdict
    detail: str = ""
    remedy: str = ""
    numbers: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "section": self.section,
            "check": self.check,
            "verdict": self.verdict.value,
            "detail": self.detail,
            "remedy": self.remedy,
            "numbers": dict(self.numbers),
        }


@dataclass(frozen=True)
class Card:
    """The whole report.

    Attributes:
        subject: What the environment was called.
        about: What is known of it, and how it was audited.
        entries: In the order in which they were found.
        seconds: How long it took.
    """

    subject: str
    about: Mapping[str, Any]
    entries: Sequence[Entry]
    seconds: float

    def counts(self) -> dict[str, int]:
        """How many entries came out in which way."""
        counted = Counter(entry.verdict for entry in self.entries)
        return {verdict.value: counted[verdict] for verdict in Verdict}

    def passes(self, fail_on: Verdict) -> bool:
        """Whether no entry is as severe as this, or more."""
        return all(_SEVERITY[entry.verdict] < _SEVERITY[fail_on] for entry in self.entries)

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "format": 1,
            "subject": self.subject,
            "about": dict(self.about),
            "counts": self.counts(),
            "seconds": round(self.seconds, 3),
            "entries": [entry.as_dict() for entry in self.entries],
        }
