"""Whether an environment blocks its process: the cost of resets, and of steps on repetitive replies."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

import gymnasium

from rollgym.clients.checks.report import Finding, Status
from rollgym.clients.checks.target import CheckTarget
from rollgym.clients.measuring.long_texts import BEYOND_CHANCE_S, LIMIT_S, SIZES, long_texts
from rollgym.clients.measuring.metrics import Cost, MachineSpeed, seconds_out_of_line, unmeasured
from rollgym.clients.protocol.spaces import UnicodeText

_RESETS = 8
_REPEATS = 3
_PATIENCE_S = 10.0
Clock = Callable[[], float]
_REMEDY = (
    "whoever shares the process waits for it: bound the work, or leave metadata['inline'] out, so that it runs in a "
    "process of its own"
)


def check_costs(target: CheckTarget) -> Iterator[Finding]:
    """Measure how long others wait, without the load of the machine; repeat slow measurements."""
    env = target.build()
    try:
        inline = bool(env.metadata.get("inline", False))
        yield _resets(env, inline)
        if isinstance(env.action_space, UnicodeText):
            yield _long_replies(env, inline)
    finally:
        env.close()


def _resets(env: gymnasium.Env[Any, Any], inline: bool) -> Finding:
    check = f"a reset takes less than {LIMIT_S * 1e3:.0f} ms"
    env.reset(seed=0)  # loading happens once, and is not measured
    clock, machine_speed = _clock(inline), MachineSpeed()
    costs = [_cost(clock, partial(env.reset, seed=seed), machine_speed) for seed in range(_RESETS)]
    seed = max(range(_RESETS), key=lambda seed: (costs[seed].undisturbed >= LIMIT_S, costs[seed].seconds))
    worst = costs[seed]
    said = f"{worst.seconds * 1e3:.1f} ms at most, of {_RESETS} seeds"
    if worst.seconds < LIMIT_S:
        return Finding(check, Status.PASS, said)
    if not inline:
        return Finding(check, Status.PASS, f"{said}; it does not run inline, so nobody else waits")
    if worst.undisturbed < LIMIT_S:
        return Finding(check, Status.SKIP, unmeasured(said, worst))
    return Finding(check, Status.FAIL, f"{worst.seconds * 1e3:.0f} ms with seed {seed}", _REMEDY)


def _long_replies(env: gymnasium.Env[Any, Any], inline: bool) -> Finding:
    check = f"a megabyte is read in less than {LIMIT_S * 1e3:.0f} ms"
    clock, machine_speed, deadline = _clock(inline), MachineSpeed(), time.monotonic() + _PATIENCE_S
    slowest, tried, disturbed = 0.0, 0, ""
    env.reset(seed=0)
    for name, text in long_texts():
        if time.monotonic() > deadline:
            break
        tried += 1
        # From small to large: quadratic cost is found before it takes minutes.
        for size in SIZES:
            cost = _cost(clock, partial(_answered, env, text[:size]), machine_speed)
            slowest = max(slowest, cost.seconds)
            said = f"{size:,} characters of {name} take {cost.seconds * 1e3:.0f} ms"
            if cost.undisturbed >= LIMIT_S:
                return Finding(check, Status.FAIL if inline else Status.WARN, said, _READING_REMEDY)
            if cost.seconds >= LIMIT_S:
                disturbed = unmeasured(said, cost)
    if disturbed:
        return Finding(check, Status.SKIP, disturbed)
    return Finding(check, Status.PASS, f"{slowest * 1e3:.1f} ms at most, of {tried} texts")


_READING_REMEDY = (
    "a model that repeats itself writes this, and whoever shares the process waits: look at no place of a reply twice "
    "(patterns without .*? up to a mark that may never come), and read no more than a bounded part of it"
)


def _answered(env: gymnasium.Env[Any, Any], text: str) -> None:
    _, _, terminated, truncated, _ = env.step(text)
    if terminated or truncated:
        env.reset(seed=0)


def _clock(inline: bool) -> Clock:
    """Return the clock to measure with.

    An inline environment blocks the others while it computes, sleeps or waits; only the time that it waited for a
    processor is not its fault. In its own process only its own computing counts, not the wait for a program that it
    runs.
    """
    return seconds_out_of_line if inline else time.process_time


def _cost(clock: Clock, act: Callable[[], Any], machine_speed: MachineSpeed) -> Cost:
    """Return how long an act takes; if it is slow, the shortest of several runs, and how slow the machine is."""
    seconds, slowdowns = _once(clock, act), [1.0]
    if seconds >= LIMIT_S:
        slowdowns = [machine_speed.slowdown()]
    for _ in range(_REPEATS - 1):
        if not LIMIT_S <= seconds < BEYOND_CHANCE_S:
            break
        seconds = min(seconds, _once(clock, act))
        slowdowns.append(machine_speed.slowdown())
    return Cost(seconds, median(slowdowns) if seconds >= LIMIT_S else 1.0)


def _once(clock: Clock, act: Callable[[], Any]) -> float:
    begun = clock()
    act()
    return clock() - begun
