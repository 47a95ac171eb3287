"""Deterministic generation: whole batches in a fixed order, whatever the order of arrival."""

import asyncio

import pytest

from rollgym.trainer.inference.base import GenerationRequest, GenerationResult, SamplingParams
from rollgym.trainer.inference.errors import StructuredOutputError
from rollgym.trainer.rollout.batcher import DeterministicBatcher
from rollgym.trainer.tasks.task import Task

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
