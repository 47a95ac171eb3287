"""How much of what comes in at once is done in one turn of the event loop."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rollgym.env_server.common.admissions import Admissions
from rollgym.env_server.common.event_loop import SLICE_S

_MOST = 8
"""So many pieces of work fit into the time of one turn, with what is done before it is known that it is another."""


class Bench:
    """Work that takes time on a clock of its own, and the turns of the loop in which it is done.

    Args:
        piece_s: How long a piece takes.
    """

    def __init__(self, piece_s: float = SLICE_S / 5) -> None:
        self.now = 100.0
        self.admissions = Admissions(lambda: self.now)
        self.turn = 0
        self.done: list[int] = []
        self.of_turn: Counter[int] = Counter()
        self._piece_s = piece_s

    def work(self, number: int) -> None:
        self.now += self._piece_s
        self.done.append(number)
        self.of_turn[self.turn] += 1

    async def wait_and_work(self, number: int) -> None:
        await self.admissions.turn()
        self.work(number)

    @asynccontextmanager
    async def counting(self) -> AsyncIterator[None]:
        """Count the turns of the loop meanwhile."""

        async def count() -> None:
            while True:
                self.turn += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count())
        try:
            yield
        finally:
            counting.cancel()


async def test_a_burst_is_done_in_order_and_in_many_turns() -> None:
    bench = Bench()
    async with bench.counting():
        await asyncio.gather(*(bench.wait_and_work(number) for number in range(200)))
    assert bench.done == list(range(200))
    assert max(bench.of_turn.values()) <= _MOST
    assert len(bench.of_turn) < 100, "a turn is used for what fits into it"


async def test_work_that_takes_longer_than_a_turn_is_done_in_a_turn_of_its_own() -> None:
    bench = Bench(10 * SLICE_S)
    async with bench.counting():
        await asyncio.gather(*(bench.wait_and_work(number) for number in range(20)))
    assert bench.done == list(range(20))
    assert sorted(bench.of_turn.values())[-2:-1] == [1], (
        "but for the first two: is it still the turn of the first?"
    )


async def test_callbacks_and_tasks_have_one_line() -> None:
    bench = Bench()
    ended = asyncio.get_running_loop().create_future()
    async with bench.counting():
        tasks = [asyncio.ensure_future(bench.wait_and_work(number)) for number in range(60)]
        await asyncio.sleep(0)
        for number in range(60, 120):
            bench.admissions.call(lambda number=number: bench.work(number))
        bench.admissions.call(lambda: ended.set_result(None))
        assert bench.admissions.waiting > 100
        await asyncio.gather(*tasks, ended)
    assert bench.done == list(range(120))
    assert max(bench.of_turn.values()) <= _MOST
    assert bench.admissions.waiting == 0


async def test_who_comes_while_others_wait_does_not_overtake_them() -> None:
    bench = Bench()
    first = [asyncio.ensure_future(bench.wait_and_work(number)) for number in range(30)]
    await asyncio.sleep(0)
    assert not bench.admissions.are_open()
    await asyncio.gather(*first, bench.wait_and_work(30))
    assert bench.done == list(range(31))


async def test_who_is_cancelled_in_line_keeps_nobody() -> None:
    bench = Bench()
    tasks = [asyncio.ensure_future(bench.wait_and_work(number)) for number in range(100)]
    await asyncio.sleep(0)
    for task in tasks[20:80]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert bench.done == [*range(20), *range(80, 100)]


async def test_where_nobody_waits_nothing_does() -> None:
    bench = Bench()
    for number in range(50):
        assert bench.admissions.are_open()
        bench.work(number)
        await asyncio.sleep(0)
        await asyncio.sleep(0)


async def test_how_long_the_first_in_line_has_waited_is_known() -> None:
    bench = Bench()
    assert bench.admissions.waited_s == 0.0
    bench.admissions.call(lambda: None)
    bench.now += 3.0
    assert bench.admissions.waited_s == 3.0
    while bench.admissions.waiting:
        await asyncio.sleep(0)
    assert bench.admissions.waited_s == 0.0
