"""The report card: the checks, their results, and their display on a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text


class CardVerdict(Enum):
    """How one entry of the card came out."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    SKIPPED = "skipped"


_SEVERITY = {CardVerdict.SKIPPED: 0, CardVerdict.OK: 0, CardVerdict.WARNING: 1, CardVerdict.FAILED: 2}


@dataclass(frozen=True)
class CardEntry:
    """One line of the card.

    Attributes:
        section: Its section: `determinism`, `baselines`, `leaks`, `rewards`, `conformance`, `verifier`,
            `difficulty` or `costs`.
        check: The question.
        verdict: How it came out.
        detail: The finding, in a sentence with its numbers.
        remedy: The remedy.
        numbers: The measurements, for programs.
    """

    section: str
    check: str
    verdict: CardVerdict
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
        subject: The environment's name.
        about: Facts about it, and about the audit.
        entries: The lines, in the order of their checks.
        seconds: How long it took.
    """

    subject: str
    about: Mapping[str, Any]
    entries: Sequence[CardEntry]
    seconds: float

    def counts(self) -> dict[str, int]:
        """How many entries came out in which way."""
        counted = Counter(entry.verdict for entry in self.entries)
        return {verdict.value: counted[verdict] for verdict in CardVerdict}

    def passes(self, fail_on: CardVerdict) -> bool:
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


_MARKS = {
    CardVerdict.OK: ("✓", "green"),
    CardVerdict.WARNING: ("!", "bold yellow"),
    CardVerdict.FAILED: ("✗", "bold red"),
    CardVerdict.SKIPPED: ("-", "dim"),
}

_IN_A_ROW = frozenset({"determinism", "conformance", "rewards", "verifier"})
"""Sections whose good entries need no line each; the JSON has them all."""


def print_card(card: Card, console: Console) -> None:
    """Print a line for each entry, with the remedy under those that need one, and a line that sums up."""
    about = card.about
    flag = "deterministic" if about["deterministic"] else "not declared deterministic"
    title = f"{about['kind']}, version {about['version']}, {about['isolation']}, {flag}"
    console.print(Text.assemble((card.subject, "bold"), ("  " + title, "dim")), soft_wrap=True)
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 1))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for section, entries in groupby(card.entries, lambda entry: entry.section):
        first = section
        for mark, check, said in _rows(section, list(entries)):
            table.add_row(Text(first), mark, Text(check), said)
            first = ""
    console.print(table)
    console.print(_sum(card))


def _rows(section: str, entries: Sequence[CardEntry]) -> Iterator[tuple[Text, str, Text]]:
    """A row for each entry; if numbers are not informative, one row for all passed entries."""
    well = [entry for entry in entries if entry.verdict is CardVerdict.OK]
    if section in _IN_A_ROW and len(well) > 1:
        names = ", ".join(entry.check for entry in well)
        yield Text(*_MARKS[CardVerdict.OK]), f"{len(well)} checks", Text(names)
        entries = [entry for entry in entries if entry.verdict is not CardVerdict.OK]
    for entry in entries:
        yield Text(*_MARKS[entry.verdict]), entry.check, _said(entry)


def _said(entry: CardEntry) -> Text:
    """The finding and the remedy; neither is markup."""
    needs = entry.verdict in (CardVerdict.WARNING, CardVerdict.FAILED)
    said = Text(
        _printable(entry.detail), "" if needs else "dim" if entry.verdict is CardVerdict.SKIPPED else ""
    )
    if needs and entry.remedy:
        said.append(f"\n→ {entry.remedy}", "italic cyan")
    return said


def _printable(text: str) -> str:
    """Write control characters, which an environment may well have sent, as escapes."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def _sum(card: Card) -> Text:
    counts = card.counts()
    parts = [f"{counts['ok']} ok"]
    for verdict, name in (
        (CardVerdict.WARNING, "warned"),
        (CardVerdict.FAILED, "failed"),
        (CardVerdict.SKIPPED, "not checked"),
    ):
        if counts[verdict.value]:
            parts.append(f"{counts[verdict.value]} {name}")
    worst = next(
        (each for each in (CardVerdict.FAILED, CardVerdict.WARNING) if counts[each.value]), CardVerdict.OK
    )
    return Text(f"{', '.join(parts)}, in {card.seconds:.1f} s", _MARKS[worst][1])
