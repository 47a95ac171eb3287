"""Replies are sampled in the order of the stream, so many at once, and inference servers may go and come back."""

import asyncio
import random

import pytest

from tests.support.virtual_time import run_virtually
from trainer.inference.base import (
    GenerationRequest,
    GenerationResult,
    InferenceHealth,
    InferenceUnavailableError,
    SamplingParams,
)
from trainer.rollout.generation import GenerationQueue
from trainer.rollout.outages import OutageReport


class Client:
    """Answers after a moment, and may be gone."""

    version = 3

    def __init__(self, duration=1.0):
        self.duration = duration
        self.running = self.peak = 0
        self.asked: list[tuple[int, ...]] = []
        self.gone = False
        self.looked = 0

    async def generate(self, request):
        if self.gone:
            raise InferenceUnavailableError("connection refused")
        self.asked.append(request.order)
        self.running += 1
        self.peak = max(self.peak, self.running)
        try:
            await asyncio.sleep(self.duration)
        finally:
            self.running -= 1
        return GenerationResult([request.order[0]], [0.0], [self.version])

    async def sync(self, source, version):
        if self.gone:
            raise InferenceUnavailableError("connection refused")
        self.version = version

    async def health(self):
        self.looked += 1
        if self.gone == "altogether":
            raise ConnectionRefusedError
        return InferenceHealth(not self.gone)

    async def close(self):
        pass


def request(*order):
    return GenerationRequest("-".join(map(str, order)), [1], SamplingParams(1), seed=0, order=order)


class Lines:
    live = False

    def __init__(self):
        self.said = []

    def say(self, text):
        self.said.append(text)

    def status(self, text):
        self.said.append(text)


async def ask_all(queue, orders):
    async with asyncio.TaskGroup() as group:
        for order in orders:
            group.create_task(queue.generate(request(*order)))


def test_the_oldest_group_is_sampled_first_whoever_came_first():
    client = Client()
    orders = [(9, 0, 0), (8, 0, 0), (4, 1, 0), (7, 0, 0), (4, 0, 3), (4, 0, 2)]
    run_virtually(ask_all(GenerationQueue(client, 2), orders))
    assert client.asked == [(9, 0, 0), (8, 0, 0), (4, 0, 2), (4, 0, 3), (4, 1, 0), (7, 0, 0)]
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


@pytest.mark.parametrize("gone", [True, "altogether"])
def test_servers_that_are_gone_are_waited_for_and_a_line_says_so(gone):
    client, lines = Client(), Lines()
    client.gone = gone

    async def run():
        queue = GenerationQueue(client, 2, OutageReport(lines, 300.0), 300.0)
        loop = asyncio.get_running_loop()
        loop.call_later(60.0, lambda: setattr(client, "gone", False))
        await ask_all(queue, [(index, 0) for index in range(4)])
        await queue.close()
        return loop.time()

    assert 60.0 < run_virtually(run()) < 70.0
    assert sorted(client.asked) == [(index, 0) for index in range(4)]
    assert client.looked < 25, "one looks for all, ever more rarely"
    assert lines.said[0].startswith("inference has not answered for ")
    assert "4 episodes wait; the run is saved and ends after 300 s" in lines.said[0]
    assert lines.said[-1].startswith("inference was gone for 6")


def test_new_weights_wait_for_somebody_to_take_them():
    client = Client()
    client.gone = True

    async def run():
        queue = GenerationQueue(client, 2)
        asyncio.get_running_loop().call_later(30.0, lambda: setattr(client, "gone", False))
        await queue.sync(object(), 8)
        return queue.version

    assert run_virtually(run()) == 8


def test_patience_ends_with_a_word_on_why_and_counts_from_the_last_answer():
    client = Client()

    async def run():
        queue = GenerationQueue(client, 2, None, 40.0)
        loop = asyncio.get_running_loop()
        await queue.generate(request(0))
        client.gone = True
        before = loop.time()
        ends = await asyncio.gather(
            *(queue.generate(request(index)) for index in range(3)), return_exceptions=True
        )
        assert [str(end) for end in ends] == [
            "no inference server has answered for 40 s (connection refused)"
        ] * 3
        assert isinstance(ends[0], ConnectionError), "a run that loses its servers is saved and ends"
        assert loop.time() - before == pytest.approx(40.0)

    run_virtually(run())


def test_servers_that_say_ready_and_never_answer_do_not_hold_a_run_for_ever():
    class Liar(Client):
        async def health(self):
            return InferenceHealth(True)

    client = Liar()
    client.gone = True

    async def run():
        with pytest.raises(InferenceUnavailableError, match="for 40 s"):
            await GenerationQueue(client, 2, None, 40.0).generate(request(0))

    run_virtually(run())
