"""Schedulers of episodes that are made at once."""

from rollgym.trainer.records.group import GroupPlan
from rollgym.trainer.records.ledger import Ledger
from rollgym.trainer.records.trajectory import Trajectory, TrajectoryOutcome
from rollgym.trainer.rollout.admission import AdmissionWindow
from rollgym.trainer.rollout.scheduler import RolloutScheduler
from rollgym.trainer.rollout.slots import EpisodeSlots
from rollgym.trainer.tasks.task import Task


class CountingSource:
    def task(self, index):
        return Task(index, "Any-v0", seed=1000 + index)


class CountedSlots(EpisodeSlots):
    def __init__(self):
        self.running = 0

    def enter(self):
        self.running += 1

    def leave(self, task):
        self.running -= 1


def scheduler_of(
    play,
    *,
    groups=2,
    size=3,
    staleness=0,
    extra=0,
    attempts=2,
    timeout=5.0,
    slots=None,
    extra_groups=0,
    leave_out=None,
    judge=None,
    report=lambda _: None,
    **plan,
):
    return RolloutScheduler(
        CountingSource(),
        AdmissionWindow(groups, staleness, extra=extra_groups),
        play,
        GroupPlan(size, extra, attempts, timeout, **plan),
        Ledger(),
        slots or EpisodeSlots(),
        report,
        leave_out=leave_out,
        judge=judge,
    )


async def solved(task, member, attempt):
    return Trajectory(task, member, attempt, outcome=TrajectoryOutcome.SOLVED)
