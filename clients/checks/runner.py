"""Running the checks, with the author's exceptions as findings."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from rollgym.clients.checks.costs import check_costs
from rollgym.clients.checks.examples import check_examples
from rollgym.clients.checks.local import (
    check_gymnasium,
    check_kwargs,
    check_odd_actions,
    check_play,
    check_seeds,
    check_spaces,
    check_stateless,
)
from rollgym.clients.checks.report import Finding, Status
from rollgym.clients.checks.served import check_served
from rollgym.clients.checks.target import Target, TargetError
from rollgym.clients.checks.tools import check_tools

Check = Callable[[Target], Iterator[Finding]]

CHECKS: dict[str, Check] = {
    "Gymnasium's check_env": check_gymnasium,
    "spaces": check_spaces,
    "play": check_play,
    "odd replies": check_odd_actions,
    "tools": check_tools,
    "example replies": check_examples,
    "seeds": check_seeds,
    "statelessness": check_stateless,
    "kwargs": check_kwargs,
    "costs": check_costs,
    "serving": check_served,
}


def run_checks(target: Target) -> list[Finding]:
    """Run all checks on an environment; the first one that cannot even be built ends them.

    Raises:
        TargetError: The name does not lead to an environment.
    """
    built = _guard("it can be made", _check_build, target)
    findings = list(built)
    if any(finding.status is Status.FAIL for finding in findings):
        return findings
    for name, check in CHECKS.items():
        findings.extend(_guard(name, check, target))
    return findings


def _check_build(target: Target) -> Iterator[Finding]:
    target.build().close()
    yield Finding("it can be made", Status.PASS)


def _guard(name: str, check: Check, target: Target) -> Iterator[Finding]:
    """Run one check; this is the boundary to the author's code."""
    try:
        yield from check(target)
    except TargetError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever the author's code raises is a finding
        message = str(error).strip() or "no message"
        yield Finding(name, Status.FAIL, f"{type(error).__name__}: {message}", _place(error))


def _place(error: Exception) -> str:
    """Return the line of the author's own code, or of code that it calls, that raised an error."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = str(Path(__file__).parents[1])
    last = frames[-1]
    return "" if last.filename.startswith(ours) else f"raised at {last.filename}:{last.lineno} in {last.name}"
