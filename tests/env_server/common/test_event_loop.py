"""Work within the event loop: one client's thousand resets are not one turn, nor is all that comes in at once."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from rollgym.env_server.common.event_loop import SLICE_S, Admissions
from tests.support.wire import Server, Socket

_MOST = 8
"""So many pieces of work fit into the time of one turn, with what is done before it is known that it is another."""

COUNT = 20
SLEEP = {"sleep": 0.01}
Ask = Callable[[Server, Socket, str], Awaitable[None]]


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


class Resumed:
    """Counts how often what it waits for goes on."""

    def __init__(self, awaited: Coroutine[Any, Any, None]) -> None:
        self._awaited = awaited
        self.times = 0

    def __await__(self) -> Generator[Any, None, None]:
        waiting = self._awaited.__await__()
        with suppress(StopIteration):
            while True:
                yield next(waiting)
                self.times += 1


async def test_few_are_woken_in_vain() -> None:
    bench = Bench()
    each = [Resumed(bench.wait_and_work(number)) for number in range(400)]

    async def play(one: Resumed) -> None:
        await one

    async with bench.counting():
        await asyncio.gather(*map(play, each))
    assert bench.done == list(range(400))
    assert sum(one.times for one in each) < 1.5 * len(each)


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


async def test_who_is_admitted_knows_when() -> None:
    bench = Bench()
    seen: list[bool] = []

    async def look_and_work(number: int) -> None:
        await bench.admissions.turn()
        seen.append(bench.admissions.admitted_at == bench.now)
        bench.work(number)

    await asyncio.gather(*map(look_and_work, range(100)))
    assert seen == [True] * 100


async def test_how_long_the_first_in_line_has_waited_is_known() -> None:
    bench = Bench()
    assert bench.admissions.waited_s == 0.0
    bench.admissions.call(lambda: None)
    bench.now += 3.0
    assert bench.admissions.waited_s == 3.0
    while bench.admissions.waiting:
        await asyncio.sleep(0)
    assert bench.admissions.waited_s == 0.0


async def _a_batch(server: Server, socket: Socket, session_id: str) -> None:
    ops = [{"op": "reset", "session_id": session_id, "options": SLEEP}] * COUNT
    number = await socket.send("batch", ops=ops)
    after = await socket.send("step", session_id=session_id, action="a")
    results = (await socket.answer(number))["results"]
    assert [result["ok"]["episode"] for result in results] == list(range(1, COUNT + 1))
    assert (await socket.answer(after))["ok"]["episode"] == COUNT, "what comes after it waits for all of it"


async def _a_batch_that_waits_for_a_copy(server: Server, socket: Socket, session_id: str) -> None:
    ops = [{"op": "reset", "session_id": session_id, "options": SLEEP}] * COUNT
    results = await socket.batch({"op": "fork", "session_id": session_id}, *ops)
    assert [result["ok"].get("episode") for result in results] == [None, *range(1, COUNT + 1)]


async def _frames(server: Server, socket: Socket, session_id: str) -> None:
    numbers = [await socket.send("reset", session_id=session_id, options=SLEEP) for _ in range(COUNT)]
    episodes = [(await socket.answer(number))["ok"]["episode"] for number in numbers]
    assert episodes == list(range(1, COUNT + 1))


async def _new_sessions(server: Server, socket: Socket, session_id: str) -> None:
    numbers = [await socket.send("make", env_id="Count", reset={"options": SLEEP}) for _ in range(COUNT)]
    made = [(await socket.answer(number))["ok"]["session_id"] for number in numbers]
    assert len(set(made)) == COUNT


async def _new_sessions_in_a_batch(server: Server, socket: Socket, session_id: str) -> None:
    op = {"op": "make", "env_id": "Count", "reset": {"options": SLEEP}}
    assert all("ok" in result for result in await socket.batch(*[op] * COUNT))


async def _a_rebuilt_episode(server: Server, socket: Socket, session_id: str) -> None:
    await socket.call("reset", session_id=session_id)
    for _ in range(4):
        await socket.batch(*[{"op": "step", "session_id": session_id, "action": "a"}] * 1000)
    episode = await socket.call("episode", session_id=session_id)
    reseeds = [[step, 1] for step in range(1, len(episode["actions"]) + 1)]
    await socket.call("restore", episode={**episode, "reseeds": reseeds})


@pytest.mark.parametrize(
    "ask",
    [
        _a_rebuilt_episode,
        _a_batch,
        _a_batch_that_waits_for_a_copy,
        _frames,
        _new_sessions,
        _new_sessions_in_a_batch,
    ],
)
async def test_others_are_answered_in_between(server: Server, ask: Ask) -> None:
    async with server.socket() as busy, server.socket() as other:
        session_id = await busy.make()
        asking = asyncio.ensure_future(ask(server, busy, session_id))
        answered = 0
        while not asking.done():
            await other.call("ping")
            answered += 1
        await asking
        assert answered > COUNT / 3, "once for the work of some milliseconds, not once for all of it"
