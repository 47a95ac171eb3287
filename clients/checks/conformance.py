"""The checks of `roll-env check`: run one by one and on a real server, and as one assertion for an author's tests."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rollgym.clients.checks.costs import check_costs
from rollgym.clients.checks.declared import check_baselines, check_examples
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
from rollgym.clients.checks.target import CheckTarget, TargetError
from rollgym.clients.checks.tools import check_tools
from rollgym.clients.checks.trace import SEEDS, RandomActions, first_difference, trace
from rollgym.clients.client.env import RemoteEnv
from rollgym.clients.process.local_server import LocalServer
from rollgym.clients.protocol.errors import ProblemError

_STEPS = 50


def _check_served(target: CheckTarget) -> Iterator[Finding]:
    """Serve it and play over the wire."""
    with LocalServer(target.server_arguments(), target.variables) as server:
        yield from _check_on(server.url, target)


def _check_on(url: str, target: CheckTarget) -> Iterator[Finding]:
    check = "served and played over the wire"
    local = target.build()
    deterministic = bool(local.metadata.get("deterministic", False))
    try:
        remote = RemoteEnv(url, target.served_id, target.client_kwargs)
    except ProblemError as problem:
        local.close()
        yield Finding(
            check,
            Status.FAIL,
            str(problem),
            "a client may set what `kwargs_schema` lists, and nothing else"
            if problem.code == "invalid_kwargs"
            else "see what the server says with `roll-serve --env ... --log-level debug`",
        )
        return
    try:
        if (remote.action_space, remote.observation_space) != (local.action_space, local.observation_space):
            yield Finding(
                check,
                Status.FAIL,
                "the spaces differ from the local ones",
                "make them alike in every process",
            )
        elif deterministic:
            apart = first_difference(trace(local), trace(remote))
            status = Status.FAIL if apart else Status.PASS
            yield Finding(check, status, apart or "equal to local play", "see the checks of seeds above")
        else:
            yield Finding(check, Status.PASS, f"{_play(remote)} steps")
    finally:
        remote.close()
        local.close()


def _play(env: Any) -> int:
    """Play a little; return the number of steps."""
    steps = 0
    for seed in SEEDS:
        actions = RandomActions(env.action_space, seed)
        _, info = env.reset(seed=seed)
        for _ in range(_STEPS):
            _, _, terminated, truncated, info = env.step(actions.choose(info))
            steps += 1
            if terminated or truncated:
                break
    return steps


Check = Callable[[CheckTarget], Iterator[Finding]]

CHECKS: dict[str, Check] = {
    "Gymnasium's check_env": check_gymnasium,
    "spaces": check_spaces,
    "play": check_play,
    "odd replies": check_odd_actions,
    "tools": check_tools,
    "example replies": check_examples,
    "baselines": check_baselines,
    "seeds": check_seeds,
    "statelessness": check_stateless,
    "kwargs": check_kwargs,
    "costs": check_costs,
    "serving": _check_served,
}


def run_checks(target: CheckTarget) -> list[Finding]:
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


def _check_build(target: CheckTarget) -> Iterator[Finding]:
    target.build().close()
    yield Finding("it can be made", Status.PASS)


def _guard(name: str, check: Check, target: CheckTarget) -> Iterator[Finding]:
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
        findings = run_checks(CheckTarget(name, kwargs))
    except TargetError as error:
        raise AssertionError(str(error)) from error
    failures = [finding for finding in findings if finding.status is Status.FAIL]
    if failures:
        raise AssertionError("\n".join([f"{name} fails {len(failures)} checks", *map(_line, failures)]))


def _line(finding: Finding) -> str:
    return "; ".join(filter(None, (f"{finding.check}: {finding.detail}", finding.remedy)))
