"""Rollout scheduling on published profiles: asynchronous against synchronous, and against what no schedule can beat.

The real scheduler, its slots and its queue of replies run on an event loop whose clock is virtual, so the figures are
exact and repeatable, and no machine's load is in them. `profiles.py` says where the times come from. Engine and trainer
have hardware of their own in every row, so what is compared is waiting: a synchronous step leaves the one idle while
the other works.

The bound. By the end of a run, every turn of every group that was trained has been sampled, `slots` at a time, and all
its steps were trained one after the other. So from the first moment on a run takes at least

    max(sum of the consumed turns' generation / slots, steps * training)

and no schedule takes less. (Seconds a step after the first one, without what the pipeline held at its beginning, can be
fewer: that part of the work was done in the first step.) `busy` is the share of the run in which the engine's slots
sampled: it is above the bound's share where replies were sampled that nothing trained on, those under way at the end
included.

`turns` are those of consumed episodes over those of started ones, without what was under way at the end.

    python benchmarks/rollout/run.py --output benchmarks/results/rollout.json
"""

import argparse
import asyncio
import json
import os
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from profiles import PROFILES, Profile  # noqa: E402

from rollgym.clients.measuring.revision import revision  # noqa: E402
from rollgym.trainer.inference.base import GenerationRequest, GenerationResult, SamplingParams  # noqa: E402
from rollgym.trainer.inference.forwarding import GenerationQueue  # noqa: E402
from rollgym.trainer.records.group import GroupPlan  # noqa: E402
from rollgym.trainer.records.ledger import Ledger  # noqa: E402
from rollgym.trainer.records.trajectory import Trajectory, TrajectoryOutcome  # noqa: E402
from rollgym.trainer.rollout.admission import AdmissionWindow  # noqa: E402
from rollgym.trainer.rollout.scheduler import RolloutScheduler  # noqa: E402
from rollgym.trainer.rollout.slots import EpisodeSlots  # noqa: E402
from rollgym.trainer.tasks.task import Task  # noqa: E402
from tests.support.virtual_time import run_virtually  # noqa: E402

SAMPLING = SamplingParams(1)


@dataclass(frozen=True)
class Schedule:
    """How groups are played."""

    name: str
    staleness: int
    by_step: bool = True
    extra_members: int = 0
    extra_groups: int = 0


SCHEDULES = [
    Schedule("synchronous (staleness 0)", 0),
    Schedule("synchronous, extra_groups 2", 0, extra_groups=2),
    Schedule("synchronous, extra_members 1", 0, extra_members=1),
    Schedule("staleness 1", 1),
    Schedule("staleness 2, replies by arrival", 2, by_step=False),
    Schedule("staleness 2", 2),
    Schedule("staleness 4", 4),
]


class ModelledEngine:
    """Takes as long for a reply as the profile says."""

    version = 0

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.busy_s = 0.0

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        task, member, turn = map(int, request.request_id.split("-"))
        took = self.profile.turns(task, member)[turn][0]
        await asyncio.sleep(took)
        self.busy_s += took
        return GenerationResult([1], [0.0], [0])


class CountingSource:
    def task(self, index: int) -> Task:
        return Task(index, "Modelled-v0", seed=index)


@dataclass
class Measured:
    """What a run took."""

    steps: int = 0
    total_s: float = 0.0
    bound_s: float = 0.0
    busy: float = 0.0
    lags: list[int] = field(default_factory=list)
    turns: float = 1.0


async def play_run(profile: Profile, schedule: Schedule, steps: int) -> Measured:
    """Play and train `steps` steps from the first moment to the last."""
    engine = ModelledEngine(profile)
    queue = GenerationQueue(engine, profile.slots)

    async def play(task: Task, member: int, attempt: int) -> Trajectory:
        for turn, (_, environment_s) in enumerate(profile.turns(task.index, member)):
            priority = task.index // profile.groups if schedule.by_step else 0
            name = f"{task.index}-{member}-{turn}"
            await queue.generate(GenerationRequest(name, [1], SAMPLING, 0, priority=priority))
            await asyncio.sleep(environment_s)
        return Trajectory(task, member, attempt, outcome=TrajectoryOutcome.SOLVED)

    scheduler = RolloutScheduler(
        CountingSource(),
        AdmissionWindow(profile.groups, schedule.staleness, extra=schedule.extra_groups),
        play,
        GroupPlan(profile.group_size, schedule.extra_members, 1, 1e12),
        Ledger(),
        EpisodeSlots(),
    )
    measured = Measured(steps)
    loop = asyncio.get_running_loop()
    generation_s = 0.0
    consumed_turns, trained = 0, set()
    for version in range(steps):
        groups = (await scheduler.next_groups(version)).kept
        await asyncio.sleep(profile.train_s)
        for group in groups:
            measured.lags.append(version - group.admitted_version)
            trained.add(group.index)
            for played in group.trajectories:
                turns = profile.turns(group.index, played.member)
                generation_s += sum(seconds for seconds, _ in turns)
                consumed_turns += len(turns)
            scheduler.release(group)
    measured.total_s = loop.time()
    measured.busy = engine.busy_s / (measured.total_s * profile.slots)
    measured.bound_s = max(generation_s / profile.slots, steps * profile.train_s)
    await scheduler.close()
    size = profile.group_size + schedule.extra_members
    settled = [
        index for index in range(scheduler.window.next_index) if index not in scheduler.window.untrained
    ]
    started = [len(profile.turns(index, member)) for index in settled for member in range(size)]
    measured.turns = (
        consumed_turns / (steps * profile.groups * profile.group_size) / (sum(started) / len(started))
    )
    return measured


def lockstep(profile: Profile, steps: int) -> Measured:
    """Every turn of the batch waits for its slowest environment and reply, as vectorised rollouts do."""
    measured = Measured(steps, lags=[0])
    generation_s = 0.0
    for step in range(steps):
        episodes = [
            profile.turns(step * profile.groups + group, member)
            for group in range(profile.groups)
            for member in range(profile.group_size)
        ]
        measured.total_s += profile.train_s
        for turn in range(max(map(len, episodes))):
            alive = [turns[turn] for turns in episodes if len(turns) > turn]
            replies = sum(seconds for seconds, _ in alive)
            generation_s += replies
            longest = max(seconds for seconds, _ in alive)
            measured.total_s += max(longest, replies / profile.slots) + max(seconds for _, seconds in alive)
    measured.bound_s = max(generation_s / profile.slots, steps * profile.train_s)
    measured.busy = generation_s / profile.slots / measured.total_s
    return measured


def report(name: str, measured: Measured, synchronous_s: float) -> dict[str, float]:
    """Print a row and return it."""
    step_s = measured.total_s / measured.steps
    row = {
        "step_s": step_s,
        "of_bound": measured.bound_s / measured.total_s,
        "engine_busy": measured.busy,
        "speed_up": synchronous_s / step_s,
        "mean_lag": sum(measured.lags) / len(measured.lags),
        "max_lag": max(measured.lags),
        "turns_consumed_over_started": measured.turns,
    }
    print(
        f"{name:<33}{step_s:>10.1f}{row['of_bound']:>9.1%}{row['engine_busy']:>8.1%}{row['speed_up']:>9.2f}x"
        f"{row['mean_lag']:>9.2f}{row['max_lag']:>8}{row['turns_consumed_over_started']:>8.3f}",
        flush=True,
    )
    return row


def measure(profile: Profile, steps: int) -> dict[str, dict[str, float]]:
    """Print the table of one profile and return it."""
    heads = (
        ("s a step", 10),
        ("of bound", 9),
        ("busy", 8),
        ("speed-up", 10),
        ("mean lag", 9),
        ("max", 8),
        ("turns", 8),
    )
    print(f"{'schedule':<33}" + "".join(f"{name:>{width}}" for name, width in heads))
    synchronous = run_virtually(play_run(profile, SCHEDULES[0], steps))
    synchronous_s = synchronous.total_s / steps
    rows = {"lockstep": report("lockstep", lockstep(profile, steps), synchronous_s)}
    rows[SCHEDULES[0].name] = report(SCHEDULES[0].name, synchronous, synchronous_s)
    for schedule in SCHEDULES[1:]:
        measured = run_virtually(play_run(profile, schedule, steps))
        rows[schedule.name] = report(schedule.name, measured, synchronous_s)
    return rows


def calibrate(profile: Profile) -> None:
    """Show that a synchronous step of the model takes what the log says: generation 4191.6 s a step."""
    steps = 8
    idle = run_virtually(play_run(replace(profile, train_s=0.0), SCHEDULES[0], steps))
    print(f"generation of a synchronous step: {idle.total_s / steps:.1f} s (the log: 4191.6 s)")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--profile", choices=[*PROFILES, "all"], default="all")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--calibrate", action="store_true", help="compare the model of retool with its log")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.calibrate:
        calibrate(PROFILES["retool"]())
        return
    results = {}
    for name in PROFILES if options.profile == "all" else [options.profile]:
        print(f"\n{name}")
        results[name] = measure(PROFILES[name](), options.steps)
    if options.output:
        commit = revision()
        record = {
            "command": " ".join(["python", *sys.argv]),
            "commit": commit,
            "load": os.getloadavg(),
            "steps": options.steps,
            "results": results,
        }
        options.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
