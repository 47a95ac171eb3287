"""Findings, and how they are printed."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

import orjson
from rich.console import Console
from rich.markup import escape


class Status(Enum):
    """The result of a check."""

    PASS = "PASS"
    WARN = "WARN"
    FAIL = "FAIL"
    SKIP = "SKIP"


class Finding(NamedTuple):
    """The finding of a check.

    Attributes:
        check: The check's name.
        status: How it ended.
        detail: The observation, in a sentence.
        remedy: The action to take.
    """

    check: str
    status: Status
    detail: str = ""
    remedy: str = ""


def shortened_repr(value: object, most: int = 60) -> str:
    """Return the Python representation of a value, cut to `most` characters."""
    text = repr(value)
    return text if len(text) <= most else f"{text[: most - 3]}..."


_STYLES = {Status.PASS: "green", Status.WARN: "yellow", Status.FAIL: "bold red", Status.SKIP: "dim"}


def print_report(subject: str, findings: Sequence[Finding], *, as_json: bool) -> int:
    """Print findings for people or programs; return the exit code, 1 if a check failed."""
    failed = sum(finding.status is Status.FAIL for finding in findings)
    warned = sum(finding.status is Status.WARN for finding in findings)
    if as_json:
        rows = [finding._asdict() | {"status": finding.status.value} for finding in findings]
        print(orjson.dumps({"subject": subject, "ok": failed == 0, "findings": rows}).decode())  # noqa: T201
        return 1 if failed else 0
    console = Console(highlight=False, emoji=False)
    for finding in findings:
        style = _STYLES[finding.status]
        console.print(
            f"[{style}]{finding.status.value}[/] {escape(finding.check)}"
            + (f": {escape(finding.detail)}" if finding.detail else ""),
            soft_wrap=True,
        )
        if finding.remedy and finding.status is not Status.PASS:
            console.print(f"     {escape(finding.remedy)}", soft_wrap=True)
    console.print(
        f"{escape(subject)}: {failed} failed, {warned} warned, {len(findings)} checks", soft_wrap=True
    )
    return 1 if failed else 0
