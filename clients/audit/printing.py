"""The card on a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.console import Console
from rich.table import Table
from rich.text import Text

from clients.audit.card import Card, Entry, Verdict

_MARKS = {
    Verdict.OK: ("✓", "green"),
    Verdict.WARNING: ("!", "bold yellow"),
    Verdict.FAILED: ("✗", "bold red"),
    Verdict.SKIPPED: ("-", "dim"),
}

_IN_A_ROW = frozenset({"determinism", "conduct", "rewards", "verifier"})
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


def _rows(section: str, entries: Sequence[Entry]) -> Iterator[tuple[Text, str, Text]]:
    """A row for each entry; where numbers say nothing, one for all that are well."""
    well = [entry for entry in entries if entry.verdict is Verdict.OK]
    if section in _IN_A_ROW and len(well) > 1:
        names = ", ".join(entry.check for entry in well)
        yield Text(*_MARKS[Verdict.OK]), f"{len(well)} checks", Text(names)
        entries = [entry for entry in entries if entry.verdict is not Verdict.OK]
    for entry in entries:
        yield Text(*_MARKS[entry.verdict]), entry.check, _said(entry)


def _said(entry: Entry) -> Text:
    """What was seen, and what to do; neither is markup."""
    needs = entry.verdict in (Verdict.WARNING, Verdict.FAILED)
    said = Text(_printable(entry.detail), "" if needs else "dim" if entry.verdict is Verdict.SKIPPED else "")
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
        (Verdict.WARNING, "warned"),
        (Verdict.FAILED, "failed"),
        (Verdict.SKIPPED, "not checked"),
    ):
        if counts[verdict.value]:
            parts.append(f"{counts[verdict.value]} {name}")
    worst = next((each for each in (Verdict.FAILED, Verdict.WARNING) if counts[each.value]), Verdict.OK)
    return Text(f"{', '.join(parts)}, in {card.seconds:.1f} s", _MARKS[worst][1])
