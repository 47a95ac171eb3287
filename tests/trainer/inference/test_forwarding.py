"""Replies are sampled in the order of the stream, and so many at once."""

import asyncio
import random

import pytest

from rollgym.trainer.inference.base import GenerationRequest, GenerationResult, SamplingParams
from rollgym.trainer.inference.forwarding import GenerationQueue
from tests.support.virtual_time import run_virtually


class Client:
    """Answers after a moment."""

    version = 3

    def __init__(self, duration=1.0):
        self.duration = duration
        self.running = self.peak = 0
        self.asked: list[tuple[int, ...]] = []

    async def generate(self, request):
        self.asked.append(request.order)
        self.running += 1
        self.peak = max(self.peak, self.running)
        try:
            await asyncio.sleep(self.duration)
        finally:
            self.running -= 1
        return GenerationResult([request.order[0]], [0.0], [self.version])


def request(*order):
    return GenerationRequest(
        "-".join(map(str, order)), [1], SamplingParams(1), seed=0, order=order, priority=order[0]
    )


async def ask_all(queue, orders):
    async with asyncio.TaskGroup() as group:
        for order in orders:
            group.create_task(queue.generate(request(*order)))


def test_the_smallest_priority_is_sampled_first_and_then_whoever_came_first():
    client = Client()
    orders = [(9, 0, 0), (8, 0, 0), (4, 1, 0), (7, 0, 0), (4, 0, 3), (4, 0, 2)]
    run_virtually(ask_all(GenerationQueue(client, 2), orders))
    assert client.asked == [(9, 0, 0), (8, 0, 0), (4, 1, 0), (4, 0, 3), (4, 0, 2), (7, 0, 0)]
    assert client.peak == 2


@pytest.mark.parametrize("seed", range(20))
def test_no_place_in_the_engine_is_lost_whoever_is_cancelled_when(seed):
    chance = random.Random(seed)
    client = Client()
    queue = GenerationQueue(client, 3)

    async def run():
        asked = []
        for index in range(40):
            asked.append(asyncio.create_task(queue.generate(request(chance.randrange(9), index))))
            if chance.random() < 0.5:
                chance.choice(asked).cancel()
            await asyncio.sleep(chance.choice([0, 0, 0.5, 1.0]))
        ends = await asyncio.gather(*asked, return_exceptions=True)
        assert {type(end) for end in ends} <= {GenerationResult, asyncio.CancelledError}
        assert client.peak <= 3
        client.peak = 0
        await ask_all(queue, [(1, 0), (2, 0), (3, 0), (4, 0)])
        assert client.peak == 3

    run_virtually(run())
