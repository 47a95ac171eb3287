"""A scheduler that is cancelled or closed at any moment, and episodes that cannot be made or never end."""

import asyncio

import pytest

from rollgym.trainer.core.errors import RunError
from rollgym.trainer.records.group import GroupPlan
from rollgym.trainer.records.ledger import Ledger
from rollgym.trainer.records.trajectory import TrajectoryOutcome
from rollgym.trainer.rollout.admission import AdmissionWindow
from rollgym.trainer.rollout.scheduler import RolloutScheduler
from rollgym.trainer.rollout.slots import BoundedSlots, DeterministicBatcher
from tests.support.schedulers import CountedSlots, CountingSource, scheduler_of, solved
from tests.support.virtual_time import run_virtually

TURNS = range(40)


async def turn_by_turn(task, member, attempt):
    for _ in range(3):
        await asyncio.sleep(0)
    await asyncio.sleep(1.0 + member)
    return await solved(task, member, attempt)


def left_over():
    return asyncio.all_tasks() - {asyncio.current_task()}


@pytest.mark.parametrize("turns", TURNS)
@pytest.mark.parametrize("closed_first", [True, False])
def test_nothing_is_left_whenever_a_step_is_cancelled_and_closed(turns, closed_first):
    async def run():
        slots = CountedSlots()
        scheduler = scheduler_of(
            turn_by_turn, staleness=1, extra=1, extra_groups=1, slots=slots, leave_out=lambda group: None
        )
        step = asyncio.create_task(scheduler.next_groups(version=0))
        for _ in range(turns):
            await asyncio.sleep(0.1 if turns > 20 else 0)
        endings = [scheduler.close, lambda: asyncio.gather(step, return_exceptions=True)]
        if not closed_first:
            step.cancel()
            endings.reverse()
        for end in endings:
            await end()
        await scheduler.close()
        assert not left_over()
        assert slots.running == 0
        if closed_first and not step.cancelled() and step.exception() is not None:
            assert isinstance(step.exception(), RunError)

    run_virtually(run())


@pytest.mark.parametrize("turns", TURNS)
def test_a_step_that_was_cancelled_can_be_asked_for_again_and_loses_no_group(turns):
    async def run():
        scheduler = scheduler_of(turn_by_turn, groups=3, size=2)
        step = asyncio.create_task(scheduler.next_groups(version=0))
        await asyncio.sleep(0.06 * turns)
        step.cancel()
        (end,) = await asyncio.gather(step, return_exceptions=True)
        if isinstance(end, asyncio.CancelledError):
            end = await scheduler.next_groups(version=0)
        assert [group.index for group in end.kept] == [0, 1, 2]
        await scheduler.close()

    run_virtually(run())


def test_closed_before_the_first_turn_of_anything_and_played_no_more():
    async def run():
        slots, asked = CountedSlots(), []

        async def play(task, member, attempt):
            asked.append(task.index)
            return await solved(task, member, attempt)

        scheduler = scheduler_of(play, slots=slots)
        scheduler.admit(version=0)
        assert slots.running == 6
        await scheduler.close()  # without a turn of the loop between
        assert slots.running == 0
        assert asked == []
        scheduler.admit(version=0)
        assert not left_over()
        with pytest.raises(RunError, match=r"was closed|was cancelled"):
            await scheduler.next_groups(version=0)

    run_virtually(run())


def test_an_evaluation_after_a_scheduler_that_was_closed_waits_for_nobody():
    class Client:
        async def generate_together(self, requests):
            return requests

    async def run():
        batcher = DeterministicBatcher(Client(), places=2)
        scheduler = scheduler_of(turn_by_turn, slots=batcher)
        scheduler.admit(version=0)
        await scheduler.close()
        assert batcher._entered == batcher._started == 0

    run_virtually(run())


@pytest.mark.parametrize("turns", range(12))
def test_places_are_free_again_whenever_it_is_closed(turns):
    async def run():
        slots = BoundedSlots(2, {"Any-v0": 2})
        scheduler = scheduler_of(turn_by_turn, slots=slots)
        scheduler.admit(version=0)
        for _ in range(turns):
            await asyncio.sleep(0)
        await scheduler.close()
        task = CountingSource().task(0)
        async with asyncio.timeout(5):
            await slots.start(task, 0)
            await slots.start(task, 1)

    run_virtually(run())


def test_a_source_that_fails_ends_the_run_with_its_error():
    class Broken(CountingSource):
        def task(self, index):
            if index == 3:
                raise ValueError("no such row")
            return super().task(index)

    async def run():
        slots = CountedSlots()
        scheduler = RolloutScheduler(
            Broken(), AdmissionWindow(2, 1), turn_by_turn, GroupPlan(2, 0, 1, 9.0), Ledger(), slots
        )
        with pytest.raises(ValueError, match="no such row"):
            await scheduler.next_groups(version=0)
        await scheduler.close()
        assert slots.running == 0

    run_virtually(run())


def test_an_episode_that_cannot_be_begun_ends_the_run_with_its_error():
    def no_coroutine(task, member, attempt):
        raise TypeError("missing argument")

    async def run():
        scheduler = scheduler_of(no_coroutine)
        with pytest.raises(TypeError, match="missing argument"):
            await scheduler.next_groups(version=0)
        await scheduler.close()

    run_virtually(run())


def test_an_episode_that_ignores_being_cancelled_is_left_behind_and_played_again():
    stubborn_ends = asyncio.Event()
    said = []

    async def play(task, member, attempt):
        if task.index == 0 and member == 0 and attempt == 0:
            while not stubborn_ends.is_set():
                try:
                    await stubborn_ends.wait()
                except asyncio.CancelledError:
                    continue
        return await solved(task, member, attempt)

    async def run():
        slots = CountedSlots()
        scheduler = scheduler_of(play, timeout=30.0, slots=slots, report=said.append)
        loop = asyncio.get_running_loop()
        step = await scheduler.next_groups(version=0)
        assert loop.time() == pytest.approx(30.0 + 10.0)
        assert step.kept[0].failures == {"timeout": 1}
        assert [each.attempt for each in step.kept[0].trajectories] == [1, 0, 0]
        assert scheduler.counters["episodes_left_behind"] == 1
        assert said == ["Any-v0: an episode does not end although it was cancelled, and is left behind"]
        async with asyncio.timeout(60):
            await scheduler.close()
        assert slots.running == 0
        stubborn_ends.set()
        await asyncio.sleep(1)
        assert not left_over()

    run_virtually(run())


def test_time_without_a_server_is_not_an_episodes_own_and_what_it_played_is_kept():
    gone = [True]

    async def play(task, member, attempt):
        await asyncio.sleep(100.0)
        gone[0] = False
        return await solved(task, member, attempt)

    async def disconnected():
        return gone[0]

    async def run():
        scheduler = scheduler_of(play, timeout=30.0)
        scheduler._disconnected = disconnected
        step = await scheduler.next_groups(version=0)
        assert asyncio.get_running_loop().time() == 100.0
        assert {each.outcome for group in step.kept for each in group.trajectories} == {
            TrajectoryOutcome.SOLVED
        }
        assert scheduler.counters["episodes_timeout"] == 0
        await scheduler.close()

    run_virtually(run())
