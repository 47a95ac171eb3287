"""The check end to end: the environment on a real server on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rollgym.clients.checks.report import Finding, Status
from rollgym.clients.checks.target import Target
from rollgym.clients.checks.trace import SEEDS, RandomActions, first_difference, trace
from rollgym.clients.client.env import RemoteEnv
from rollgym.clients.process.local_server import LocalServer
from rollgym.clients.protocol.errors import ProblemError

_STEPS = 50


def check_served(target: Target) -> Iterator[Finding]:
    """Serve it and play over the wire."""
    with LocalServer(target.server_arguments(), target.variables) as server:
        yield from _check_on(server.url, target)


def _check_on(url: str, target: Target) -> Iterator[Finding]:
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
