"""Holds what is skipped in CI against a list, so that no test is left out unnoticed.

Where the variable `CI` is set, a run fails for a skip that `tests/skipped.toml` does not have. A step of CI that names
itself in `ROLLGYM_CI_STEP` also fails for a skip that is listed for other steps alone, and for an entry of its own that
skips nothing.
"""

import re
import tomllib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

LIST = Path(__file__).parents[1] / "skipped.toml"
_NOT_CHECKED = {pytest.ExitCode.INTERRUPTED, pytest.ExitCode.INTERNAL_ERROR, pytest.ExitCode.USAGE_ERROR}


@dataclass(frozen=True, slots=True)
class Skip:
    """One skip of a run: the file of the test, and the reason that it gave."""

    file: str
    reason: str


@dataclass(frozen=True, slots=True)
class Entry:
    """What may be skipped.

    Attributes:
        tests: The beginning of the path of the tests' files.
        reason: A regular expression that is in the reason of the skip.
        skipped_in: The steps of CI that skip it.
        run_by: The step that runs it instead; empty if none does.
        why: Why no step runs it; empty if one does.
        unless: What a machine has where it is not skipped; empty if it is skipped on every machine.
    """

    tests: str
    reason: str
    skipped_in: tuple[str, ...]
    run_by: str = ""
    why: str = ""
    unless: str = ""

    def __post_init__(self) -> None:
        if bool(self.run_by) == bool(self.why):
            raise ValueError(f"{self.name}: give either run_by or why")
        if self.run_by in self.skipped_in:
            raise ValueError(f"{self.name}: {self.run_by} cannot run what it skips")

    @property
    def name(self) -> str:
        return f"{self.tests}: {self.reason}"

    def covers(self, skip: Skip) -> bool:
        return skip.file.startswith(self.tests) and re.search(self.reason, skip.reason) is not None


def read_entries(path: Path = LIST) -> list[Entry]:
    """The entries of a list; TypeError for an unknown key."""
    tables = tomllib.loads(path.read_text())["skip"]
    return [Entry(**table | {"skipped_in": tuple(table["skipped_in"])}) for table in tables]


def complaints(skips: Iterable[Skip], entries: list[Entry], step: str) -> list[str]:
    """What a run skipped that it must not, and what it should have skipped.

    Args:
        skips: What the run skipped.
        entries: The list.
        step: The step of CI that ran; empty if the run is part of none, which may skip all that is listed.
    """
    allowed = [entry for entry in entries if not step or step in entry.skipped_in]
    unlisted = Counter(skip for skip in skips if not any(entry.covers(skip) for entry in allowed))
    where = f" for {step}" if step else ""
    found = [
        f"skipped and not listed{where} in tests/skipped.toml: {skip.file}: {skip.reason} ({count})"
        for skip, count in unlisted.items()
    ]
    required = [entry for entry in entries if step in entry.skipped_in and not entry.unless]
    found += [
        f"listed{where} in tests/skipped.toml and not skipped; remove the entry: {entry.name}"
        for entry in required
        if not any(entry.covers(skip) for skip in skips)
    ]
    return found


def summary(skips: Iterable[Skip], entries: list[Entry]) -> list[str]:
    """How many skips each entry has, with what runs them instead."""
    counts = Counter(next((entry for entry in entries if entry.covers(skip)), None) for skip in skips)
    return [
        f"{count} {entry.name} [{f'run by {entry.run_by}' if entry.run_by else entry.why}]"
        for entry, count in counts.most_common()
        if entry is not None
    ]


class SkipCheck:
    """The pytest plugin: collects the skips of a run and fails it for what `complaints` finds.

    Args:
        entries: The list.
        step: The step of CI that runs; empty for none.
    """

    def __init__(self, entries: list[Entry], step: str) -> None:
        self._entries, self._step = entries, step
        self._skips: list[Skip] = []
        self._modules: set[Skip] = set()
        self._complaints: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            self._skips.append(_skip_of(report))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        # Every worker of xdist reports the same module.
        if report.skipped and (skip := _skip_of(report)) not in self._modules:
            self._modules.add(skip)
            self._skips.append(skip)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus in _NOT_CHECKED or session.config.getoption("collectonly"):
            return  # nothing ran, or not all
        self._complaints = complaints(self._skips, self._entries, self._step)
        if self._complaints and exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self._skips or self._complaints:
            terminalreporter.section(f"{len(self._skips)} skipped in CI")
        for line in [*summary(self._skips, self._entries), *self._complaints]:
            terminalreporter.write_line(line)


def _skip_of(report: pytest.TestReport | pytest.CollectReport) -> Skip:
    assert isinstance(report.longrepr, tuple), report.longrepr
    return Skip(report.nodeid.partition("::")[0], report.longrepr[2].removeprefix("Skipped: "))
