"""Costs: how long resets and steps take, whether they block others, and whether memory grows with every episode."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import pairwise
from statistics import median

from rollgym.clients.audit.card import CardEntry, CardVerdict
from rollgym.clients.audit.policies import GiveUp, random_policy, takes_text
from rollgym.clients.audit.subject import Subject
from rollgym.clients.client.session import EnvSession
from rollgym.clients.measuring.long_texts import BEYOND_CHANCE_S, LIMIT_S, SIZES, long_texts
from rollgym.clients.measuring.metrics import Cost, MachineSpeed, seconds_out_of_line, unmeasured
from rollgym.clients.protocol.errors import ProblemError

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
_HELD_RESETS = 16
_HELD_REPEATS = 4
# An episode that begins with them has room for them, each a million characters of several bytes.
_HELD_TOGETHER = 4
_LEAST_TEXTS, _ALL_FROM_EPISODES = 8, 100
_GROWS = 8 * 1024
_GROWS_FAST = 64 * 1024


async def audit_costs(subject: Subject) -> list[CardEntry]:
    """Measure latency one call at a time, calls that block the server, and memory over many episodes."""
    return [*await _latency(subject), *await _held_up(subject), await _memory(subject)]


async def _latency(subject: Subject) -> list[CardEntry]:
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


def _timed(check: str, seconds: Sequence[float]) -> CardEntry:
    if not seconds:
        return CardEntry(_SECTION, check, CardVerdict.SKIPPED, "none could be timed")
    ordered = sorted(seconds)
    middle, slowest = median(ordered), ordered[int(0.99 * (len(ordered) - 1))]
    slow = middle > _SLOW_S
    return CardEntry(
        _SECTION,
        check,
        CardVerdict.WARNING if slow else CardVerdict.OK,
        f"median {middle * 1e3:.2f} ms, 99 % within {slowest * 1e3:.2f} ms, round trip, of {len(ordered)}",
        "rollouts wait for it: make it faster, or give the server more workers" if slow else "",
        {"count": len(ordered), "median_ms": middle * 1e3, "p99_ms": slowest * 1e3},
    )


async def _held_up(subject: Subject) -> list[CardEntry]:
    """Measure how long resets, and steps on repetitive replies, block the process that all sessions share."""
    checks = ("reset holds nobody up", "a megabyte holds nobody up")
    speaks = takes_text(subject.action_space)
    if subject.env.isolation != "inline":
        detail = f"it runs in a {subject.env.isolation}, and not in the loop that serves everybody"
        return [CardEntry(_SECTION, check, CardVerdict.OK, detail) for check in checks[: 1 + speaks]]
    deadline = subject.budget.share(0.3)
    measures = [_held_up_by_resets, *([_held_up_by_texts] if speaks else [])]
    entries = []
    async with subject.arena().sessions(1) as (session,):
        for check, measure in zip(checks, measures, strict=False):
            try:
                entries.append(await measure(subject, session, check, deadline))
            except ProblemError as problem:
                entries.append(CardEntry(_SECTION, check, CardVerdict.SKIPPED, f"it failed: {problem}"))
    return entries


async def _held_up_by_resets(subject: Subject, session: EnvSession, check: str, deadline: float) -> CardEntry:
    machine_speed, costs = MachineSpeed(), []
    for seed in subject.seeds("holding up", _HELD_RESETS):
        costs.append(await _cost(subject, partial(session.reset, seed), machine_speed))
        if time.monotonic() > deadline or costs[-1].undisturbed >= LIMIT_S:
            break
    worst = max(costs, key=_badness)
    detail = f"{worst.seconds * 1e3:.1f} ms at most, of {len(costs)} seeds"
    remedy = (
        "bound what a reset does, or leave metadata['inline'] out, so that it runs in a process of its own"
    )
    return _held(check, worst, detail, remedy)


async def _held_up_by_texts(subject: Subject, session: EnvSession, check: str, deadline: float) -> CardEntry:
    machine_speed, worst, detail, tried = MachineSpeed(), Cost(0.0), "", 0
    for name, text in _some(list(long_texts()), subject.settings.episodes):
        if time.monotonic() > deadline or worst.undisturbed >= LIMIT_S:
            break
        tried += 1
        # The bound of an episode's actions, in bytes.
        await session.reset(0)
        # A small part first: quadratic cost shows before it takes minutes.
        for size in SIZES:
            act = partial(_answered, session, text[:size])
            cost = await _cost(subject, act, machine_speed, partial(session.reset, 0))
            if _badness(cost) > _badness(worst):
                worst = cost
                detail = f"{size:,} characters of {name} take {cost.seconds * 1e3:.1f} ms"
            # What a busy machine may have slowed down is certain with more of the text, if it is quadratic.
            if cost.undisturbed >= LIMIT_S:
                break
    remedy = "look at no place of a reply twice, and read no more than a bounded part of it"
    return _held(check, worst, f"{detail}; {tried} texts" if tried else "no time was left", remedy)


def _badness(cost: Cost) -> tuple[bool, float]:
    """What surely takes too long is worse than what may have been slowed down."""
    return cost.undisturbed >= LIMIT_S, cost.seconds


def _some(texts: Sequence[tuple[str, str]], episodes: int) -> Sequence[tuple[str, str]]:
    """Return all texts for a hundred episodes or more, else as large a share of them, from all kinds."""
    share = max(_LEAST_TEXTS, len(texts) * min(episodes, _ALL_FROM_EPISODES) // _ALL_FROM_EPISODES)
    return [texts[index * len(texts) // share] for index in range(share)]


def _held(check: str, worst: Cost, detail: str, remedy: str) -> CardEntry:
    numbers = {
        "slowest_ms": worst.seconds * 1e3,
        "limit_ms": LIMIT_S * 1e3,
        "machine_slowdown": worst.slowdown,
    }
    if worst.undisturbed >= LIMIT_S:
        remedy = f"everybody on the server waits meanwhile: {remedy}"
        return CardEntry(_SECTION, check, CardVerdict.FAILED, detail, remedy, numbers)
    if worst.seconds >= LIMIT_S:
        return CardEntry(_SECTION, check, CardVerdict.SKIPPED, unmeasured(detail, worst), "", numbers)
    return CardEntry(_SECTION, check, CardVerdict.OK, detail, "", numbers)


async def _answered(session: EnvSession, text: str) -> None:
    _, _, terminated, truncated, _ = await session.step(text)
    if terminated or truncated:
        await session.reset(0)


async def _cost(
    subject: Subject,
    act: Callable[[], Awaitable[object]],
    machine_speed: MachineSpeed,
    make_room: Callable[[], Awaitable[object]] | None = None,
) -> Cost:
    """Return how long an act blocks the server: its round trip, or the shortest of several if that is slow.

    Before each of the others, what makes room for them is done, which is not measured.

    On a busy machine all of them are slow, because the server waits for a processor, or because others share what it
    computes with. If the server reports the waiting time, it is subtracted; the speed of the machine tells the rest.
    """
    seconds = await _round_trip(act)
    slowdowns = []
    for _ in range(1, _HELD_REPEATS):
        if seconds < LIMIT_S:
            return Cost(seconds)
        if make_room is not None:
            await make_room()
        taken, queued = await _taken(subject, act)
        slowdowns.append(machine_speed.slowdown())
        seconds = min(seconds, taken)
        if taken - queued >= BEYOND_CHANCE_S:
            return Cost(taken - queued, median(slowdowns))
    if seconds >= LIMIT_S:
        if make_room is not None:
            await make_room()
        # Several together, since the server may stand in line to answer how long it did so, too.
        taken, queued = await _taken(subject, act, _HELD_TOGETHER)
        slowdowns.append(machine_speed.slowdown())
        seconds = min(seconds, max(0.0, taken - queued) / _HELD_TOGETHER)
    return Cost(seconds, median(slowdowns) if seconds >= LIMIT_S else 1.0)


async def _taken(
    subject: Subject, act: Callable[[], Awaitable[object]], times: int = 1
) -> tuple[float, float]:
    """Return how long round trips take, and how long of that the server waited for a processor, if it tells."""
    before = await asyncio.to_thread(subject.queued_seconds)
    taken = sum([await _round_trip(act) for _ in range(times)])
    after = await asyncio.to_thread(subject.queued_seconds)
    return taken, 0.0 if before is None or after is None else after - before


async def _round_trip(act: Callable[[], Awaitable[object]]) -> float:
    """Return how long an act takes, without the time that this thread stood in line for a processor."""
    begun = seconds_out_of_line()
    await act()
    return seconds_out_of_line() - begun


async def _memory(subject: Subject) -> CardEntry:
    """Play in windows of equal size, and take the median growth of a window, since allocators grow in steps.

    The first windows fill bounded storage, such as caches, and are left out if enough others remain.
    """
    check = "memory"
    if await asyncio.to_thread(subject.resident_bytes) is None:
        return CardEntry(
            _SECTION,
            check,
            CardVerdict.SKIPPED,
            "this system, or this server, does not tell how much it holds",
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
            return CardEntry(_SECTION, check, CardVerdict.SKIPPED, detail)
        held = await asyncio.to_thread(subject.resident_bytes)
        if held is None or len(played) < len(games):
            break
        resident.append(held)
        episodes += len(played)
    if len(resident) < _LEAST_WINDOWS:
        return CardEntry(_SECTION, check, CardVerdict.SKIPPED, "too few episodes were played in time")
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
        return CardEntry(_SECTION, check, CardVerdict.OK, detail, "", numbers)
    return CardEntry(
        _SECTION,
        check,
        CardVerdict.FAILED if growth >= _GROWS_FAST else CardVerdict.WARNING,
        f"{detail}: {growth * 1e6 / 2**30:.0f} GiB in a million",
        "look for lists and caches that every episode adds to; `reset` and `close` must let go",
        numbers,
    )
