"""Deterministic generation: whole waves in a fixed order, whatever the order of arrival."""

import asyncio

import pytest

from trainer.inference.base import GenerationRequest, GenerationResult, SamplingParams
from trainer.rollout.gate import WaveGate


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


async def test_a_wave_waits_for_all_and_is_sorted():
    client = RecordingClient()
    gate = WaveGate(client)
    for _ in range(3):
        gate.enter()
    late = [asyncio.create_task(gate.generate(request(member))) for member in (2, 0)]
    await asyncio.sleep(0.01)
    assert client.batches == []
    results = await asyncio.gather(*late, gate.generate(request(1)))
    assert client.batches == [[(0, 0, 0), (0, 1, 0), (0, 2, 0)]]
    assert [result.token_ids for result in results] == [[2], [0], [1]]


async def test_an_episode_that_ends_frees_the_wave():
    client = RecordingClient()
    gate = WaveGate(client)
    gate.enter()
    gate.enter()
    waiting = asyncio.create_task(gate.generate(request(0)))
    await asyncio.sleep(0)
    gate.leave()
    assert (await waiting).token_ids == [0]


async def test_a_cancelled_episode_leaves_the_wave():
    client = RecordingClient()
    gate = WaveGate(client)
    gate.enter()
    gate.enter()
    doomed = asyncio.create_task(gate.generate(request(0)))
    await asyncio.sleep(0)
    doomed.cancel()
    with pytest.raises(asyncio.CancelledError):
        await doomed
    gate.leave()
    assert (await gate.generate(request(1))).token_ids == [1]
    assert client.batches == [[(0, 1, 0)]]


async def test_a_failing_engine_fails_every_waiter():
    class Broken(RecordingClient):
        async def generate_together(self, requests):
            raise RuntimeError("engine down")

    gate = WaveGate(Broken())
    gate.enter()
    gate.enter()
    results = await asyncio.gather(
        gate.generate(request(0)), gate.generate(request(1)), return_exceptions=True
    )
    assert [str(result) for result in results] == ["engine down", "engine down"]
