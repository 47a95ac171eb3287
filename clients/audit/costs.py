"""Costs: how long resets and steps take, and whether the server's memory grows with every episode."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from clients.audit.card import Entry, Verdict
from clients.audit.policies import GiveUp, random_policy
from clients.audit.subject import Subject
from clients.protocol.errors import ProblemError

_SECTION = "costs"
_RESETS = 40
_STEPS = 300
_LATENCY_S = 3.0
_SLOW_S = 1.0
_WINDOWS = 8
_WARM_UP_WINDOWS = 3
_LEAST_WINDOWS = 4
_MOST_IN_A_WINDOW = 64
_STEPS_PER_EPISODE = 20
_GROWS = 8 * 1024
_GROWS_FAST = 64 * 1024


async def audit_costs(subject: Subject) -> list[Entry]:
    """Measure latency one call at a time, and memory over many episodes."""
    return [*await _latency(subject), await _memory(subject)]


async def _latency(subject: Subject) -> list[Entry]:
    resets: list[float] = []
    steps: list[float] = []
    policy = random_policy(subject.action_space, subject.wording)
    deadline = min(subject.budget.share(0.1), time.monotonic() + _LATENCY_S)
    async with subject.arena().sessions(1) as (session,):
        for seed in subject.seeds("latency", _RESETS):
            player = policy.begin(seed)
            try:
                begun = time.perf_counter()
                observation, info = await session.reset(seed)
                resets.append(time.perf_counter() - begun)
                for _ in range(_STEPS // _RESETS * 4):
                    action = player(observation, info)
                    begun = time.perf_counter()
                    observation, _, terminated, truncated, info = await session.step(action)
                    steps.append(time.perf_counter() - begun)
                    if terminated or truncated:
                        break
            except (ProblemError, GiveUp):
                pass
            if time.monotonic() > deadline or len(steps) >= _STEPS:
                break
    return [_timed("reset", resets), _timed("step", steps)]


def _timed(check: str, seconds: Sequence[float]) -> Entry:
    if not seconds:
        return Entry(_SECTION, check, Verdict.SKIPPED, "none could be timed")
    ordered = sorted(seconds)
    middle, slowest = median(ordered), ordered[int(0.99 * (len(ordered) - 1))]
    slow = middle > _SLOW_S
    return Entry(
        _SECTION,
        check,
        Verdict.WARNING if slow else Verdict.OK,
        f"median {middle * 1e3:.2f} ms, 99 % within {slowest * 1e3:.2f} ms, round trip, of {len(ordered)}",
        "rollouts wait for it: make it faster, or give the server more workers" if slow else "",
        {"count": len(ordered), "median_ms": middle * 1e3, "p99_ms": slowest * 1e3},
    )


async def _memory(subject: Subject) -> Entry:
    """Play in windows of equal size, and take the median growth of a window: allocators grow in leaps.

    The first windows fill what has a limit, such as caches, and are left out where there are enough others.
    """
    check = "memory"
    if await asyncio.to_thread(subject.resident_bytes) is None:
        return Entry(
            _SECTION, check, Verdict.SKIPPED, "this system, or this server, does not tell how much it holds"
        )
    policy = random_policy(subject.action_space, subject.wording)
    deadline = subject.budget.share(0.2)
    resident: list[int] = []
    episodes = 0
    size = max(16, min(_MOST_IN_A_WINDOW, subject.settings.episodes))
    for window in range(_WINDOWS + 1):
        games = subject.games(policy, f"memory {window}", size)
        played = await subject.arena().play(games, max_steps=_STEPS_PER_EPISODE, deadline=deadline)
        if any(each.problem is not None for each in played):
            detail = "episodes break off, and what the server keeps of failures is not the environment's"
            return Entry(_SECTION, check, Verdict.SKIPPED, detail)
        held = await asyncio.to_thread(subject.resident_bytes)
        if held is None or len(played) < len(games):
            break
        resident.append(held)
        episodes += len(played)
    if len(resident) < _LEAST_WINDOWS:
        return Entry(_SECTION, check, Verdict.SKIPPED, "too few episodes were played in time")
    counted = resident[min(_WARM_UP_WINDOWS, len(resident) - _LEAST_WINDOWS) :]
    growth = median(after - before for before, after in pairwise(counted)) / size
    numbers = {
        "episodes": episodes,
        "bytes_per_episode": growth,
        "first_bytes": resident[0],
        "last_bytes": resident[-1],
    }
    detail = (
        f"{resident[-1] / 2**20:.0f} MiB; grows {max(0.0, growth) / 1024:.2g} KiB an episode over {episodes}"
    )
    if growth < _GROWS:
        return Entry(_SECTION, check, Verdict.OK, detail, "", numbers)
    return Entry(
        _SECTION,
        check,
        Verdict.FAILED if growth >= _GROWS_FAST else Verdict.WARNING,
        f"{detail}: {growth * 1e6 / 2**30:.0f} GiB in a million",
        "look for lists and caches that every episode adds to; `reset` and `close` must let go",
        numbers,
    )
