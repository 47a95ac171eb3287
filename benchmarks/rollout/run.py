"""Rollout scheduling under heavy-tailed environments: asynchronous against lockstep and against the bound.

The real scheduler runs on an event loop whose clock is virtual, so the figures are exact and repeatable and no
machine's load is in them. What is modelled:

- Environment step: log-normal with the median and 99th percentile of a served environment under load, 1.36 ms and
  37 ms as measured for a peer's FrozenLake server with 2,000 sessions, scaled by `--scale` to agentic lengths
  (default 100: 0.14 s and 3.7 s).
- Generation: an engine that serves `--slots` requests at once, each for `--generate` seconds.
- Training: `--train` seconds a step.
- Turns per episode: uniform in 4 .. 16.

The last column is how many turns consumed episodes have, over those that were started: below 1 where redundant members
are started and the last ones are cancelled, because short episodes end first.

The work-conserving bound is what no schedule can beat: the engine never idle, training fully hidden behind it.

    python benchmarks/rollout/run.py --output benchmarks/results/rollout.json
"""

import argparse
import asyncio
import json
import math
import selectors
import subprocess
from pathlib import Path

import numpy as np

from trainer.core.seeding import generator
from trainer.core.statistics import mean_interval
from trainer.records.ledger import Ledger
from trainer.records.trajectory import Outcome, Trajectory
from trainer.rollout.admission import AdmissionWindow
from trainer.rollout.scheduler import EpisodeSlots, GroupPlan, RolloutScheduler
from trainer.tasks.task import Task

MEDIAN_S, P99_S = 1.36e-3, 37e-3
Z_99 = 2.3263478740408408


class VirtualSelector(selectors.SelectSelector):
    """Jumps over the time that a real selector would sleep."""

    now = 0.0

    def select(self, timeout=None):
        if timeout is not None and timeout > 0:
            self.now += timeout
        return super().select(0)


def run_virtually(coroutine):
    """Run a coroutine on a loop whose clock only moves when everything waits."""
    selector = VirtualSelector()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now
    try:
        return loop.run_until_complete(coroutine)
    finally:
        loop.close()


class Workload:
    """Equal latencies for every schedule: they hang on (task, member, turn) only."""

    def __init__(self, options):
        self.options = options
        self.sigma = math.log(P99_S / MEDIAN_S) / Z_99

    def turns(self, task, member):
        return int(generator(0, "turns", task, member).integers(4, 17))

    def latencies(self, task, member):
        draws = generator(0, "latency", task, member).standard_normal(self.turns(task, member))
        return MEDIAN_S * self.options.scale * np.exp(self.sigma * draws)


class CountingSource:
    def task(self, index):
        return Task(index, "Modelled-v0", seed=index)


async def asynchronous(workload, staleness, steps, extra=0):
    """Our scheduler. Returns seconds per step, mean and largest lag, and turns of consumed over started episodes."""
    options = workload.options
    engine = asyncio.Semaphore(options.slots)

    async def play(task, member, attempt):
        for latency in workload.latencies(task.index, member):
            async with engine:
                await asyncio.sleep(options.generate)
            await asyncio.sleep(float(latency))
        return Trajectory(task, member, attempt, outcome=Outcome.SOLVED)

    scheduler = RolloutScheduler(
        CountingSource(),
        AdmissionWindow(options.groups, staleness),
        play,
        GroupPlan(options.group_size, extra, 1, 1e9),
        Ledger(),
        EpisodeSlots(),
    )
    loop = asyncio.get_running_loop()
    ends, lags, consumed, started = [], [], [], []
    for version in range(steps):
        groups = await scheduler.next_groups(version)
        await asyncio.sleep(options.train)
        lags += [version - group.admitted_version for group in groups]
        for group in groups:
            consumed += [workload.turns(group.index, played.member) for played in group.trajectories]
            started += [workload.turns(group.index, member) for member in range(options.group_size + extra)]
        for group in groups:
            scheduler.release(group)
        ends.append(loop.time())
    await scheduler.close()
    return np.diff(ends), float(np.mean(lags)), max(lags), float(np.mean(consumed) / np.mean(started))


def lockstep(workload, steps):
    """Every turn of the batch waits for its slowest environment, as vectorised rollouts do."""
    options = workload.options
    durations = []
    for step in range(steps):
        episodes = [
            workload.latencies(step * options.groups + group, member)
            for group in range(options.groups)
            for member in range(options.group_size)
        ]
        total = options.train
        for turn in range(max(map(len, episodes))):
            alive = [latencies[turn] for latencies in episodes if len(latencies) > turn]
            total += math.ceil(len(alive) / options.slots) * options.generate + max(alive)
        durations.append(total)
    return np.array(durations)


def bound(workload, steps):
    """Seconds per step if the engine were never idle and training were hidden behind it."""
    options = workload.options
    turns = sum(
        workload.turns(index, member)
        for index in range(steps * options.groups)
        for member in range(options.group_size)
    )
    return max(options.train, turns / steps * options.generate / options.slots)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--generate", type=float, default=0.5)
    parser.add_argument("--train", type=float, default=10.0)
    parser.add_argument("--scale", type=float, default=100.0)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    workload = Workload(options)
    floor = bound(workload, options.steps)
    print(f"work-conserving bound: {floor:.1f} s a step")
    print(
        f"{'schedule':<36}{'s a step':>22}{'of bound':>10}{'mean lag':>10}{'max lag (allowed)':>20}{'turns':>8}"
    )
    results = {"bound_s": floor}

    def report(name, durations, mean_lag=0.0, seen=0, turns=1.0, allowed=0):
        interval = mean_interval([float(value) for value in durations])
        print(
            f"{name:<36}{interval!s:>22}{interval.value / floor:>10.2f}{mean_lag:>10.2f}{seen:>16} ({allowed})"
            f"{turns:>8.3f}"
        )
        results[name] = {
            "step_s": interval.value,
            "low": interval.low,
            "high": interval.high,
            "times_bound": interval.value / floor,
            "mean_lag": mean_lag,
            "max_lag": seen,
            "allowed_lag": allowed,
            "turns_consumed_over_started": turns,
        }

    report("lockstep", lockstep(workload, options.steps))
    for staleness in (0, 1, 2, 4):
        measured = run_virtually(asynchronous(workload, staleness, options.steps))
        report(f"asynchronous, staleness {staleness}", *measured, allowed=staleness)
    for extra in (1, 2):
        measured = run_virtually(asynchronous(workload, 1, options.steps, extra))
        report(f"asynchronous, staleness 1, {extra} extra", *measured, allowed=1)
    if options.output:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        settings = {key: str(value) for key, value in vars(options).items() if key != "output"}
        options.output.write_text(
            json.dumps({"commit": commit.stdout.strip(), "settings": settings, "results": results}, indent=1)
        )


if __name__ == "__main__":
    main()
