"""Episodes are bounded in all and by environment, oldest group first; no place is lost whoever is cancelled."""

import asyncio
import random

import pytest

from rollgym.trainer.rollout.slots import BoundedSlots, EpisodeSlots, Slot
from rollgym.trainer.tasks.task import Task


def task(index, env_id="Any-v0"):
    return Task(index, env_id, seed=index)


async def turns():
    for _ in range(5):
        await asyncio.sleep(0)


async def test_so_many_run_and_the_oldest_group_is_next():
    slots, running = BoundedSlots(2), []

    async def episode(index):
        slot = Slot(slots)
        await slot.start(task(index), 0)
        running.append(index)
        return slot

    async with asyncio.TaskGroup() as group:
        started = {index: group.create_task(episode(index)) for index in (5, 4, 3, 0, 2)}
        await turns()
        assert running == [5, 4]
        for expected, done in ((0, 5), (2, 4), (3, 0)):
            started[done].result().leave()
            await turns()
            assert running[-1] == expected
    assert running == [5, 4, 0, 2, 3]


async def test_one_that_waits_for_a_dear_environment_keeps_no_other_from_starting():
    slots = BoundedSlots(3, {"Sandbox-v0": 1})
    await slots.start(task(0, "Sandbox-v0"), 0)
    waiting = asyncio.create_task(slots.start(task(1, "Sandbox-v0"), 0))
    await turns()
    await asyncio.wait_for(slots.start(task(2), 0), 5)
    await asyncio.wait_for(slots.start(task(3), 0), 5)
    other = asyncio.create_task(slots.start(task(4), 0))
    await turns()
    assert not waiting.done()
    assert not other.done()
    slots.leave(task(0, "Sandbox-v0"))
    await asyncio.wait_for(waiting, 5)
    assert not other.done(), "three run"
    slots.leave(task(2))
    await asyncio.wait_for(other, 5)


async def test_a_slot_is_left_once_and_by_one_that_never_started_too():
    class Counting(EpisodeSlots):
        def __init__(self):
            self.inside, self.freed = 0, []

        def enter(self):
            self.inside += 1

        def leave(self, task):
            self.inside -= 1
            self.freed.append(task)

    slots = Counting()
    never, played = Slot(slots), Slot(slots)
    await played.start(task(7), 1)
    for slot in (never, played, never, played):
        slot.leave()
    assert slots.inside == 0
    assert slots.freed == [None, task(7)]


@pytest.mark.parametrize("seed", range(30))
async def test_no_place_is_lost_or_made_whoever_is_cancelled_when(seed):
    chance = random.Random(seed)
    limits = {"Sandbox-v0": 2}
    slots = BoundedSlots(4, limits)
    running = {"Sandbox-v0": 0, "Any-v0": 0}

    async def episode(index):
        env_id = chance.choice(list(running))
        slot = Slot(slots)
        try:
            await slot.start(task(index, env_id), 0)
            running[env_id] += 1
            try:
                assert sum(running.values()) <= 4
                assert running["Sandbox-v0"] <= 2
                for _ in range(chance.randrange(4)):
                    await asyncio.sleep(0)
            finally:
                running[env_id] -= 1
        finally:
            slot.leave()

    episodes = []
    for index in range(60):
        episodes.append(asyncio.create_task(episode(index)))
        if chance.random() < 0.5:
            chance.choice(episodes).cancel()
        for _ in range(chance.randrange(3)):
            await asyncio.sleep(0)
    async with asyncio.timeout(20):
        ends = await asyncio.gather(*episodes, return_exceptions=True)
    assert {type(end) for end in ends} <= {type(None), asyncio.CancelledError}
    assert running == {"Sandbox-v0": 0, "Any-v0": 0}
    # All places are there again.
    async with asyncio.timeout(5):
        for index in range(4):
            await slots.start(task(index, "Any-v0"), 0)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await slots.start(task(9), 0)
