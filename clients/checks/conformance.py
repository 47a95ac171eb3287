"""The checks of `roll-env check` as one assertion, for the tests of an environment."""

from __future__ import annotations

from typing import Any

from rollgym.clients.checks.report import Finding, Status
from rollgym.clients.checks.runner import run_checks
from rollgym.clients.checks.target import Target, TargetError


def check_environment(name: str, /, **kwargs: Any) -> None:
    """Assert that an environment passes all checks of `roll-env check`; they include one on a server of its own.

        def test_it_passes_the_checks() -> None:
            check_environment("my_package.game:Game", size=4)

    Warnings are not failures; `roll-env check` prints them.

    Args:
        name: `module:Class`, or the id of an environment of this package, of Gymnasium or of an installed package.
        kwargs: The kwargs that it is made with.

    Raises:
        AssertionError: If a check fails, or the name does not lead to an environment; the message has a line for each
            failure.
    """
    try:
        findings = run_checks(Target(name, kwargs))
    except TargetError as error:
        raise AssertionError(str(error)) from error
    failures = [finding for finding in findings if finding.status is Status.FAIL]
    if failures:
        raise AssertionError("\n".join([f"{name} fails {len(failures)} checks", *map(_line, failures)]))


def _line(finding: Finding) -> str:
    return "; ".join(filter(None, (f"{finding.check}: {finding.detail}", finding.remedy)))
