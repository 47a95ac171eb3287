"""Groups are completed, replaced and counted; nothing that failed becomes a reward."""

import asyncio

import pytest

from rollgym.trainer.core.errors import RunError
from rollgym.trainer.records.group import GroupPlan
from rollgym.trainer.records.ledger import Ledger, TaskEvent
from rollgym.trainer.records.trajectory import Trajectory, TrajectoryOutcome
from rollgym.trainer.rollout.admission import AdmissionWindow
from rollgym.trainer.rollout.scheduler import EnvironmentFailsError, RolloutScheduler
from rollgym.trainer.rollout.slots import EpisodeSlots
from rollgym.trainer.tasks.task import Task
from tests.support.schedulers import CountedSlots, CountingSource, scheduler_of, solved


async def test_groups_hold_equal_tasks_in_member_order():
    async def play(task, member, attempt):
        await asyncio.sleep(0.002 * (3 - member))
        return await solved(task, member, attempt)

    scheduler = scheduler_of(play)
    groups = (await scheduler.next_groups(version=0)).kept
    assert [group.index for group in groups] == [0, 1]
    assert [[t.member for t in group.trajectories] for group in groups] == [[0, 1, 2], [0, 1, 2]]
    assert all(t.task.seed == group.task.seed for group in groups for t in group.trajectories)
    await scheduler.close()


async def test_a_batch_is_in_the_order_of_the_stream_whoever_ended_first():
    first_is_taken = asyncio.Event()

    async def play(task, member, attempt):
        if task.index == 0:
            await first_is_taken.wait()
        elif task.index == 1:
            asyncio.get_running_loop().call_soon(asyncio.get_running_loop().call_soon, first_is_taken.set)
        return await solved(task, member, attempt)

    scheduler = RolloutScheduler(
        CountingSource(),
        AdmissionWindow(4, 0, window_fraction=1.0),
        play,
        GroupPlan(1, 0, 1, 5.0),
        Ledger(),
        EpisodeSlots(),
    )
    groups = (await scheduler.next_groups(version=0)).kept
    assert [group.index for group in groups] == [0, 1, 2, 3]
    await scheduler.close()


async def test_a_failed_episode_is_played_again_and_counted():
    async def play(task, member, attempt):
        if member == 1 and attempt == 0:
            return Trajectory(task, member, attempt, outcome=TrajectoryOutcome.ENVIRONMENT_ERROR)
        return await solved(task, member, attempt)

    scheduler = scheduler_of(play)
    groups = (await scheduler.next_groups(version=0)).kept
    assert all(len(group.trajectories) == 3 for group in groups)
    assert [group.failures for group in groups] == [{"environment_error": 1}] * 2
    assert scheduler.counters["episodes_environment_error"] == 2
    assert {t.outcome for group in groups for t in group.trajectories} == {TrajectoryOutcome.SOLVED}
    await scheduler.close()


async def test_a_hung_episode_is_cancelled_and_replaced():
    hung = []

    async def play(task, member, attempt):
        if task.index == 0 and member == 0 and attempt == 0:
            try:
                await asyncio.Event().wait()
            finally:
                hung.append(task.index)
        return await solved(task, member, attempt)

    scheduler = scheduler_of(play, timeout=0.05)
    groups = (await scheduler.next_groups(version=0)).kept
    assert hung == [0]
    assert groups[0].failures == {"timeout": 1}
    await scheduler.close()


async def test_a_group_whose_rewards_never_come_is_dropped_and_replaced():
    hung = []

    async def judge(group):
        if group.index == 0:
            hung.append(group.index)
            await asyncio.Event().wait()

    scheduler = scheduler_of(solved, timeout=0.05, judge=judge)
    async with asyncio.timeout(20):
        groups = (await scheduler.next_groups(version=0)).kept
    assert hung == [0]
    assert [group.index for group in groups] == [1, 2]
    (dropped,) = scheduler.take_dropped()
    assert dropped.failures == {"timeout": 3}
    assert "no rewards of the group within 0.05 s" in dropped.detail
    await scheduler.close()


async def test_a_time_out_of_what_gives_rewards_is_its_own():
    async def judge(group):
        raise TimeoutError("its own")

    scheduler = scheduler_of(solved, judge=judge)
    with pytest.raises(TimeoutError, match="its own"):
        await scheduler.next_groups(version=0)
    await scheduler.close()


async def test_a_group_that_cannot_be_played_is_dropped_and_replaced_by_the_next_task():
    async def play(task, member, attempt):
        if task.index == 0:
            return Trajectory(task, member, attempt, outcome=TrajectoryOutcome.ENVIRONMENT_ERROR)
        return await solved(task, member, attempt)

    slots = CountedSlots()
    scheduler = scheduler_of(play, slots=slots)
    groups = (await scheduler.next_groups(version=0)).kept
    assert [group.index for group in groups] == [1, 2]
    assert scheduler._ledger.fate(0) is TaskEvent.DROPPED
    assert scheduler._ledger.counts()["dropped/failed:environment_error"] == 1
    await scheduler.close()
    assert slots.running == 0


async def test_surplus_members_are_cancelled():
    cancelled = []

    async def play(task, member, attempt):
        if member == 1:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append((task.index, member))
                raise
        return await solved(task, member, attempt)

    slots = CountedSlots()
    scheduler = scheduler_of(play, size=2, extra=1, slots=slots)
    groups = (await scheduler.next_groups(version=0)).kept
    assert [[t.member for t in group.trajectories] for group in groups] == [[0, 2], [0, 2]]
    await scheduler.close()
    assert sorted(cancelled) == [(0, 1), (1, 1)]
    assert scheduler.counters["episodes_surplus"] == 2
    assert slots.running == 0


async def test_rollouts_run_ahead_by_max_staleness_steps():
    started = []

    async def play(task, member, attempt):
        started.append(task.index)
        return await solved(task, member, attempt)

    scheduler = scheduler_of(play, groups=2, size=1, staleness=1)
    first = (await scheduler.next_groups(version=0)).kept
    assert sorted(started) == [0, 1, 2, 3]
    for group in first:
        scheduler.release(group)
    second = (await scheduler.next_groups(version=1)).kept
    assert [group.admitted_version for group in second] == [0, 0]
    await scheduler.close()


@pytest.mark.parametrize("deterministic", [False, True])
async def test_the_next_groups_may_start_while_a_step_is_written_down(deterministic):
    begun = []

    async def play(task, member, attempt):
        begun.append(task.index)
        return await solved(task, member, attempt)

    scheduler = scheduler_of(play, groups=2, size=1, replace_at_once=not deterministic)
    for group in (await scheduler.next_groups(version=0)).kept:
        scheduler.release(group)
    scheduler.begin_early(version=1)
    assert scheduler.window.untrained == (() if deterministic else (2, 3))
    groups = (await scheduler.next_groups(version=1)).kept
    assert [group.index for group in groups] == [2, 3]
    assert [group.admitted_version for group in groups] == [1, 1]
    assert begun == [0, 1, 2, 3], "none starts twice"
    await scheduler.close()


async def test_an_error_that_replaying_cannot_mend_ends_the_run():
    async def play(task, member, attempt):
        raise ValueError("bad kwargs")

    scheduler = scheduler_of(play)
    with pytest.raises(ValueError, match="bad kwargs"):
        await scheduler.next_groups(version=0)
    await scheduler.close()


async def test_an_episode_that_something_else_cancels_ends_the_run():
    async def play(task, member, attempt):
        raise asyncio.CancelledError

    scheduler = scheduler_of(play)
    async with asyncio.timeout(10):
        with pytest.raises(RunError, match="a group of episodes was cancelled while it played"):
            await scheduler.next_groups(version=0)
    await scheduler.close()


async def always_failing(task, member, attempt):
    trajectory = Trajectory(task, member, attempt, outcome=TrajectoryOutcome.ENVIRONMENT_ERROR)
    trajectory.detail = "env_error: RuntimeError: no\nboard"
    return trajectory


async def test_an_environment_that_always_fails_ends_the_run_with_its_reason():
    said = []
    scheduler = RolloutScheduler(
        CountingSource(),
        AdmissionWindow(2, 0),
        always_failing,
        GroupPlan(2, 0, 2, 5.0, max_failed_groups=5),
        Ledger(),
        EpisodeSlots(),
        said.append,
    )
    async with asyncio.timeout(20):
        with pytest.raises(EnvironmentFailsError) as ended:
            await scheduler.next_groups(version=0)
    assert str(ended.value).startswith("Any-v0 failed 6 groups in a row (rollout.max_failed_groups 5): ")
    assert str(ended.value).endswith("env_error: RuntimeError: no board")
    assert [line.partition(" dropped")[0] for line in said] == [
        "Any-v0: 1 group",
        "Any-v0: 2 groups",
        "Any-v0: 4 groups",
    ]
    await scheduler.close()


async def failing_with_much_to_say(task, member, attempt):
    trajectory = Trajectory(task, member, attempt, outcome=TrajectoryOutcome.AGENT_ERROR)
    trajectory.detail = "the program ended with code 1: " + "File line\n" * 100 + "ValueError: no such tool"
    return trajectory


async def test_a_long_reason_is_told_with_its_beginning_and_its_end():
    window, plan = AdmissionWindow(1, 0), GroupPlan(1, 0, 1, 5.0, max_failed_groups=0)
    parts = (CountingSource(), window, failing_with_much_to_say, plan, Ledger(), EpisodeSlots())
    async with asyncio.timeout(20):
        with pytest.raises(EnvironmentFailsError, match=r"code 1: File.*ValueError: no such tool$") as ended:
            await RolloutScheduler(*parts).next_groups(version=0)
    assert len(str(ended.value)) < 500


async def test_an_environment_that_fails_now_and_then_does_not():
    async def play(task, member, attempt):
        return await (always_failing if task.index % 3 else solved)(task, member, attempt)

    scheduler = scheduler_of(play, groups=1, attempts=1)
    scheduler._plan = GroupPlan(3, 0, 1, 5.0, max_failed_groups=2)
    for version in range(6):
        for group in (await scheduler.next_groups(version)).kept:
            scheduler.release(group)
    assert scheduler.counters["groups_failed"] >= 10
    await scheduler.close()


async def test_one_of_two_environments_that_fails_is_found_although_the_other_goes_on():
    class Two:
        def task(self, index):
            return Task(index, "Bad-v0" if index % 2 else "Good-v0", seed=index)

    async def play(task, member, attempt):
        return await (always_failing if task.env_id == "Bad-v0" else solved)(task, member, attempt)

    scheduler = scheduler_of(play, groups=2)
    scheduler._source = Two()

    async def steps():
        for version in range(50):
            for group in (await scheduler.next_groups(version)).kept:
                scheduler.release(group)

    with pytest.raises(EnvironmentFailsError, match="Bad-v0 failed 9 groups in a row"):
        await steps()
    await scheduler.close()


async def test_an_error_while_nobody_waits_is_raised_at_the_next_step():
    async def play(task, member, attempt):
        if task.index >= 1:
            await asyncio.sleep(0.005)
            raise ValueError("broken")
        return await solved(task, member, attempt)

    scheduler = scheduler_of(play, groups=1, size=1, staleness=1)
    (group,) = (await scheduler.next_groups(version=0)).kept
    await asyncio.sleep(0.01)
    scheduler.release(group)
    async with asyncio.timeout(10):
        with pytest.raises(ValueError, match="broken"):
            await scheduler.next_groups(version=1)
    await scheduler.close()


async def test_replacements_wait_where_who_shares_a_batch_must_not_hang_on_time():
    others_end, started = asyncio.Event(), []

    async def play(task, member, attempt):
        started.append(task.index)
        if task.index == 0:
            asyncio.get_running_loop().call_later(0.02, others_end.set)
            return await always_failing(task, member, attempt)
        if task.index == 1:
            await others_end.wait()
            assert 2 not in started, "group 1 still plays"
        return await solved(task, member, attempt)

    scheduler = RolloutScheduler(
        CountingSource(),
        AdmissionWindow(2, 0),
        play,
        GroupPlan(1, 0, 1, 5.0, replace_at_once=False),
        Ledger(),
        EpisodeSlots(),
    )
    async with asyncio.timeout(10):
        groups = (await scheduler.next_groups(version=0)).kept
    assert [group.index for group in groups] == [1, 2]
    await scheduler.close()


async def test_a_member_that_failed_leaves_after_those_that_are_cancelled():
    events = []

    class Slots(EpisodeSlots):
        def leave(self, task):
            events.append("left")

    async def play(task, member, attempt):
        if task.index == 0 and member == 1:
            return await always_failing(task, member, attempt)
        if task.index == 0:
            try:
                await asyncio.Event().wait()
            finally:
                events.append("cancelled")
        return await solved(task, member, attempt)

    scheduler = scheduler_of(play, groups=1, size=2, attempts=1, slots=Slots())
    await scheduler.next_groups(version=0)
    assert events == ["cancelled", "left", "left", "left", "left"]
    await scheduler.close()


async def test_a_greedy_episode_is_played_beside_each_group_and_is_not_one_of_its_members():
    slots = CountedSlots()
    scheduler = scheduler_of(solved, extra=1, greedy=True, slots=slots)
    groups = (await scheduler.next_groups(version=0)).kept
    for group in groups:
        assert len(group.trajectories) == 3
        assert group.greedy.member == 4, "after three members and an extra one"
        assert group.greedy not in group.trajectories
    await scheduler.close()
    assert slots.running == 0


async def test_a_group_whose_greedy_episode_fails_is_dropped():
    async def play(task, member, attempt):
        if task.index == 0 and member == 3:
            return Trajectory(task, member, attempt, outcome=TrajectoryOutcome.ENVIRONMENT_ERROR)
        return await solved(task, member, attempt)

    scheduler = scheduler_of(play, greedy=True)
    groups = (await scheduler.next_groups(version=0)).kept
    assert [group.index for group in groups] == [1, 2]
    await scheduler.close()
