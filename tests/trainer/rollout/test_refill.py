"""Dynamic sampling: groups that a filter leaves out are replaced in their step, within the bound on staleness."""

import asyncio
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollgym.trainer.records.group import GroupPlan
from rollgym.trainer.records.ledger import Ledger, TaskEvent
from rollgym.trainer.records.trajectory import Trajectory, TrajectoryOutcome
from rollgym.trainer.rollout.admission import AdmissionWindow
from rollgym.trainer.rollout.scheduler import NothingToLearnError, RolloutScheduler
from tests.support.schedulers import CountedSlots, CountingSource, scheduler_of, solved
from tests.support.virtual_time import run_virtually


def leaves_out(*indices):
    return lambda group: "filter:zero_variance" if group.index in indices else None


async def test_a_group_that_is_left_out_is_replaced_in_its_step_and_named():
    scheduler = scheduler_of(solved, groups=3, size=2, leave_out=leaves_out(0, 2, 3))
    step = await scheduler.next_groups(version=0)
    assert [group.index for group in step.kept] == [1, 4, 5]
    assert [(group.index, group.decision) for group in step.left_out] == [
        (index, "filter:zero_variance") for index in (0, 2, 3)
    ]
    assert all(len(group.trajectories) == 2 for group in step.played)
    assert [group.index for group in step.played] == list(range(6))
    assert [scheduler._ledger.fate(index) for index in (0, 2, 3)] == [TaskEvent.DROPPED] * 3
    assert scheduler._ledger.counts()["dropped/filter:zero_variance"] == 3
    assert scheduler.counters["groups_left_out"] == 3
    await scheduler.close()


async def test_where_batches_must_not_hang_on_time_replacements_come_in_rounds():
    started, open_rounds = [], []

    async def play(task, member, attempt):
        started.append(task.index)
        open_rounds.append(task.index)
        await asyncio.sleep(0.001 * (7 - task.index % 7))
        open_rounds.remove(task.index)
        if task.index >= 4:
            assert not set(open_rounds) & {0, 1, 2, 3}, "a replacement shares time with the first round"
        return await solved(task, member, attempt)

    scheduler = scheduler_of(play, groups=4, size=1, leave_out=leaves_out(0, 3), replace_at_once=False)
    step = await scheduler.next_groups(version=0)
    assert [group.index for group in step.kept] == [1, 2, 4, 5]
    await scheduler.close()


@pytest.mark.parametrize("staleness", [0, 2])
async def test_a_step_that_cannot_be_filled_trains_on_what_there_is(staleness):
    said = []
    scheduler = scheduler_of(
        solved,
        groups=4,
        size=1,
        staleness=staleness,
        leave_out=lambda group: None if group.index == 2 else "filter:zero_variance",
        report=said.append,
        max_left_out=12,
    )
    async with asyncio.timeout(20):
        step = await scheduler.next_groups(version=0)
    assert [group.index for group in step.kept] == [2]
    # Those that played when it gave up end, too: a step leaves nothing behind that is due in it.
    assert 12 <= len(step.left_out) <= 12 + (staleness + 1) * 4
    assert scheduler.counters["steps_short"] == 1
    assert said[-1].startswith("a step trains on 1 of 4 groups: ")
    assert not scheduler.window.waits
    for group in step.kept:
        scheduler.release(group)
    with pytest.raises(
        NothingToLearnError, match=r"by filter:zero_variance\) and none was kept: .*max_rounds"
    ):
        await scheduler.next_groups(version=1)
    await scheduler.close()


async def test_a_filter_that_fails_ends_the_run():
    def broken(group):
        raise ValueError("broken filter")

    scheduler = scheduler_of(solved, leave_out=broken)
    async with asyncio.timeout(10):
        with pytest.raises(ValueError, match="broken filter"):
            await scheduler.next_groups(version=0)
    await scheduler.close()


class Run:
    """A whole run of the scheduler in virtual time, and what became of every task."""

    def __init__(self, window, durations, fates, size, training):
        self.durations, self.fates, self.size, self.training = durations, fates, size, training
        self.slots = CountedSlots()
        self.ledger = Ledger()
        self.trained: list[tuple[int, int, list[int]]] = []
        self.left_out: list[int] = []
        plan = GroupPlan(size, 0, 1, 1e9, max_failed_groups=10**6)
        self.scheduler = RolloutScheduler(
            CountingSource(), window, self.play, plan, self.ledger, self.slots, leave_out=self.leave_out
        )

    async def play(self, task, member, attempt):
        await asyncio.sleep(self.durations[(task.index * 3 + member) % len(self.durations)])
        failed = self.fates[task.index % len(self.fates)] == "fails" and member == 0
        outcome = TrajectoryOutcome.ENVIRONMENT_ERROR if failed else TrajectoryOutcome.SOLVED
        return Trajectory(task, member, attempt, outcome=outcome)

    def leave_out(self, group):
        return "filter:any" if self.fates[group.index % len(self.fates)] == "left out" else None

    async def steps(self, count):
        for version in range(count):
            step = await self.scheduler.next_groups(version)
            assert [group.index for group in step.kept] == sorted(group.index for group in step.kept)
            assert len(step.kept) == self.scheduler.window.groups_per_step
            self.left_out += [group.index for group in step.left_out]
            await asyncio.sleep(self.training)
            for group in step.kept:
                self.trained.append((group.index, version - group.admitted_version, group.trajectories))
                self.scheduler.release(group)
            self.ledger.trained([group.index for group in step.kept], version)
        await self.scheduler.close()


FATES = st.lists(st.sampled_from(["kept", "left out", "fails"]), min_size=1, max_size=12).filter(
    lambda fates: "kept" in fates
)


@settings(max_examples=60)
@given(
    groups=st.integers(1, 4),
    size=st.integers(1, 3),
    staleness=st.integers(0, 3),
    extra_groups=st.sampled_from([0, 0, 1, 3]),
    fraction=st.floats(0.0, 1.0),
    durations=st.lists(st.floats(0.01, 100.0), min_size=1, max_size=30),
    fates=FATES,
    training=st.floats(0.0, 30.0),
)
def test_every_admitted_group_is_trained_in_time_or_named(
    groups, size, staleness, extra_groups, fraction, durations, fates, training
):
    window = AdmissionWindow(groups, staleness, fraction, extra=extra_groups)
    run = Run(window, durations, fates, size, training)
    run_virtually(run.steps(12))
    assert max(lag for _, lag, _ in run.trained) <= staleness
    assert all(len(trajectories) == size for _, _, trajectories in run.trained)
    indices = [index for index, _, _ in run.trained]
    assert len(set(indices)) == len(indices) == 12 * groups
    assert {fates[index % len(fates)] for index in indices} == {"kept"}
    fate_of = {index: run.ledger.fate(index) for index in range(window.next_index)}
    assert {index for index, fate in fate_of.items() if fate is TaskEvent.TRAINED} == set(indices)
    still = {index for index, fate in fate_of.items() if fate in (TaskEvent.ISSUED, TaskEvent.PUT_ASIDE)}
    assert still == set(window.untrained)
    dropped = {index for index, fate in fate_of.items() if fate is TaskEvent.DROPPED}
    assert set(run.left_out) <= dropped
    assert all(fates[index % len(fates)] != "kept" for index in dropped)
    assert run.slots.running == 0


def test_groups_put_aside_are_stopped_and_played_anew_with_all_their_episodes():
    durations, attempts = {4: 500.0}, Counter()

    async def play(task, member, attempt):
        attempts[task.index, attempt] += 1
        await asyncio.sleep(durations.get(task.index, 1.0))
        return Trajectory(task, member, attempt, outcome=TrajectoryOutcome.SOLVED)

    async def run():
        loop = asyncio.get_running_loop()
        slots = CountedSlots()
        scheduler = scheduler_of(play, groups=4, size=2, extra_groups=1, attempts=3, slots=slots)
        scheduler._plan = GroupPlan(2, 0, 3, 1e9)
        orders, ends = [], []
        for version in range(6):
            step = await scheduler.next_groups(version)
            orders.append([group.index for group in step.kept])
            ends.append(loop.time())
            for group in step.kept:
                scheduler.release(group)
            if version == 0:
                assert scheduler._ledger.fate(4) is TaskEvent.PUT_ASIDE
                assert 4 in scheduler.window.untrained
        await scheduler.close()
        assert slots.running == 0
        return orders, ends

    orders, ends = run_virtually(run())
    assert orders[0] == [0, 1, 2, 3]
    assert ends[0] == 1.0
    long_round = next(number for number, order in enumerate(orders) if 4 in order)
    assert ends[long_round] - ends[long_round - 1] == 500.0
    # What was drawn before is not taken up: it is played as a new attempt.
    assert attempts[4, 0] == attempts[4, 3] == 2
