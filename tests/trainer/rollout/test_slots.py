"""Episodes are bounded in all and by environment, and deterministic replies come in whole batches in a fixed order."""

import asyncio
import random

import pytest

from rollgym.trainer.inference.base import GenerationRequest, GenerationResult, SamplingParams
from rollgym.trainer.inference.errors import StructuredOutputError
from rollgym.trainer.rollout.slots import BoundedSlots, DeterministicBatcher, EpisodeSlots, Slot
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


TASK = Task(0, "Any-v0", seed=1)


class RecordingClient:
    """Answers a batch and remembers in which order its requests stood."""

    version = 3

    def __init__(self):
        self.batches = []

    async def generate_together(self, requests):
        self.batches.append([request.order for request in requests])
        await asyncio.sleep(0)
        return [GenerationResult([request.order[1]], [0.0], [3], "stop") for request in requests]


def request(member: int, turn: int = 0) -> GenerationRequest:
    return GenerationRequest(
        request_id=f"{member}-{turn}",
        prompt_ids=[1],
        sampling=SamplingParams(max_new_tokens=1),
        seed=0,
        order=(0, member, turn),
    )


async def test_a_batch_waits_for_all_and_is_sorted():
    client = RecordingClient()
    batcher = DeterministicBatcher(client)
    for _ in range(3):
        batcher.enter()
    late = [asyncio.create_task(batcher.generate(request(member))) for member in (2, 0)]
    await asyncio.sleep(0.01)
    assert client.batches == []
    results = await asyncio.gather(*late, batcher.generate(request(1)))
    assert client.batches == [[(0, 0, 0), (0, 1, 0), (0, 2, 0)]]
    assert [result.token_ids for result in results] == [[2], [0], [1]]


async def test_an_episode_that_ends_frees_the_batch():
    client = RecordingClient()
    batcher = DeterministicBatcher(client)
    batcher.enter()
    batcher.enter()
    waiting = asyncio.create_task(batcher.generate(request(0)))
    await asyncio.sleep(0)
    batcher.leave(TASK)
    assert (await waiting).token_ids == [0]


async def test_a_cancelled_episode_leaves_the_batch():
    client = RecordingClient()
    batcher = DeterministicBatcher(client)
    batcher.enter()
    batcher.enter()
    doomed = asyncio.create_task(batcher.generate(request(0)))
    await asyncio.sleep(0)
    doomed.cancel()
    with pytest.raises(asyncio.CancelledError):
        await doomed
    batcher.leave(TASK)
    assert (await batcher.generate(request(1))).token_ids == [1]
    assert client.batches == [[(0, 1, 0)]]


async def test_a_failing_engine_fails_every_waiter():
    class Broken(RecordingClient):
        async def generate_together(self, requests):
            raise RuntimeError("engine down")

    batcher = DeterministicBatcher(Broken())
    batcher.enter()
    batcher.enter()
    results = await asyncio.gather(
        batcher.generate(request(0)), batcher.generate(request(1)), return_exceptions=True
    )
    assert [str(result) for result in results] == ["engine down", "engine down"]


async def test_a_structured_output_that_cannot_be_had_fails_its_own_request_alone():
    class Particular(RecordingClient):
        async def generate_together(self, requests):
            for each in requests:
                if each.order[1] in (0, 2):
                    raise StructuredOutputError(f"not for {each.order[1]}", each.request_id)
            return await super().generate_together(requests)

    client = Particular()
    batcher = DeterministicBatcher(client)
    for _ in range(3):
        batcher.enter()
    results = await asyncio.gather(
        *(batcher.generate(request(member)) for member in range(3)), return_exceptions=True
    )
    assert [str(results[0]), results[1].token_ids, str(results[2])] == ["not for 0", [1], "not for 2"]
    assert client.batches == [[(0, 1, 0)]]


async def test_only_so_many_episodes_run_as_there_are_places():
    client = RecordingClient()
    batcher = DeterministicBatcher(client, places=2)
    running, most = 0, 0

    async def episode(member: int, turns: int) -> None:
        nonlocal running, most
        await batcher.start(TASK, 0)
        running += 1
        most = max(most, running)
        for turn in range(turns):
            await batcher.generate(request(member, turn))
        running -= 1
        batcher.leave(TASK)

    for _ in range(5):
        batcher.enter()
    async with asyncio.timeout(10):
        await asyncio.gather(*(episode(member, turns) for member, turns in enumerate((3, 1, 2, 1, 1))))
    assert most == 2
    # Whenever one ends the next in line takes its place, before the next batch is sent.
    assert client.batches == [
        [(0, 0, 0), (0, 1, 0)],
        [(0, 0, 1), (0, 2, 0)],
        [(0, 0, 2), (0, 2, 1)],
        [(0, 3, 0), (0, 4, 0)],
    ]


async def test_episodes_given_up_before_they_start_hold_nobody_up():
    client = RecordingClient()
    batcher = DeterministicBatcher(client, places=1)
    for _ in range(3):
        batcher.enter()
    await batcher.start(TASK, 0)
    in_line = [asyncio.create_task(batcher.start(TASK, 0)) for _ in range(2)]
    await asyncio.sleep(0)
    in_line[0].cancel()
    await asyncio.gather(in_line[0], return_exceptions=True)
    batcher.leave(None)
    batcher.leave(TASK)
    async with asyncio.timeout(10):
        await in_line[1]
        assert (await batcher.generate(request(2))).token_ids == [2]


async def test_a_place_that_comes_at_the_moment_of_cancelling_is_passed_on():
    batcher = DeterministicBatcher(RecordingClient(), places=1)
    for _ in range(3):
        batcher.enter()
    await batcher.start(TASK, 0)
    first, second = (asyncio.create_task(batcher.start(TASK, 0)) for _ in range(2))
    await asyncio.sleep(0)
    batcher.leave(TASK)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    batcher.leave(None)
    async with asyncio.timeout(10):
        await second


async def test_all_that_are_cancelled_at_once_end_by_that_in_line_too():
    batcher = DeterministicBatcher(RecordingClient(), places=1)
    batcher.enter()
    batcher.enter()
    await batcher.start(TASK, 0)
    waiting = asyncio.create_task(batcher.start(TASK, 1))
    await asyncio.sleep(0)
    waiting.cancel()
    batcher.leave(TASK)  # before the one that waits has run
    (ended,) = await asyncio.gather(waiting, return_exceptions=True)
    assert isinstance(ended, asyncio.CancelledError)
    batcher.leave(None)
    batcher.enter()
    async with asyncio.timeout(10):
        await batcher.start(TASK, 2)
