"""Requests to one server take turns, and their connections are spread out: by an own clock."""

import asyncio

from rollgym.env_server.gateway.upstream.connections import Attempt, ConnectionLimiter
from tests.support.clock import clock, on_a_clock


class Requests:
    """Requests that run until a test ends them."""

    def __init__(self, limiter: ConnectionLimiter) -> None:
        self.limiter = limiter
        self.begun: list[int] = []
        self.ends: dict[int, asyncio.Event] = {}
        self.tasks: dict[int, asyncio.Task[None]] = {}

    def start(self, *numbers: int) -> None:
        for number in numbers:
            self.ends[number] = asyncio.Event()
            self.tasks[number] = asyncio.create_task(self._run(number))

    async def _run(self, number: int) -> None:
        async with self.limiter.request():
            self.begun.append(number)
            await self.ends[number].wait()


def test_turns_are_in_order_and_none_is_lost() -> None:
    async def run() -> None:
        requests = Requests(ConnectionLimiter(2))
        requests.start(*range(6))
        await clock().forward(0)
        assert requests.begun == [0, 1]
        requests.tasks[3].cancel()  # while it waits
        requests.ends[0].set()
        requests.tasks[1].cancel()  # while it runs
        await clock().forward(0)
        assert requests.begun == [0, 1, 2, 4]
        requests.ends[2].set()
        await clock().forward(0)
        requests.tasks[5].cancel()
        requests.ends[4].set()
        await clock().forward(0)
        requests.start(6, 7, 8)
        await clock().forward(0)
        assert requests.begun[-2:] == [6, 7]
        for end in requests.ends.values():
            end.set()
        await asyncio.gather(*requests.tasks.values(), return_exceptions=True)
        assert requests.begun[-1] == 8

    on_a_clock(run())


def test_one_that_is_cancelled_as_its_turn_comes_hands_it_on() -> None:
    async def run() -> None:
        requests = Requests(ConnectionLimiter(1))
        requests.start(0, 1, 2)
        await clock().forward(0)
        async with asyncio.timeout(30):
            requests.ends[0].set()
            await requests.tasks[0]
            requests.tasks[1].cancel()
            await clock().forward(0)
            assert requests.begun[-1] == 2
            requests.ends[2].set()
            await requests.tasks[2]

    on_a_clock(run())


async def connect(limiter: ConnectionLimiter, count: int) -> list[Attempt]:
    """Begin so many connections; gives those that may be made at once."""
    attempts = [Attempt(limiter) for _ in range(count)]
    tasks = [asyncio.create_task(attempt.connecting()) for attempt in attempts]
    await clock().forward(0)
    made = [attempt for attempt, task in zip(attempts, tasks, strict=True) if task.done()]
    for task in tasks:
        task.cancel()
    return made


def test_a_server_has_to_accept_few_connections_at_once() -> None:
    async def run() -> None:
        limiter = ConnectionLimiter(64)
        first = await connect(limiter, 10)
        assert len(first) == 4
        for attempt in first[:3]:
            attempt.ended(lost=False)
        assert len(await connect(limiter, 10)) == 3, "an answer says that a connection was accepted"
        await clock().forward(limiter.patience_s)
        assert len(await connect(limiter, 10)) == 4, "and so does time"
        for attempt in first:
            attempt.ended(lost=False)
        assert await connect(limiter, 10) == [], "an end counts once"

    on_a_clock(run(), frozen=True)


def test_a_lost_connection_slows_the_next_ones_down_for_a_while() -> None:
    async def run() -> None:
        limiter = ConnectionLimiter(64)
        patience_s = limiter.patience_s
        together = await connect(limiter, 4)
        await clock().forward(1.0)
        together[0].connected()
        for attempt in together[1:]:
            attempt.ended(lost=True)
        assert limiter.patience_s == 2 * patience_s, "those that were lost together count once"
        for _ in range(20):
            [lost] = await connect(limiter, 1)
            await clock().forward(0.2)
            lost.connected()
            lost.ended(lost=True)
        assert limiter.patience_s == 32 * patience_s
        for _ in range(20):
            await clock().forward(61.0)
            async with limiter.request():
                pass
        assert limiter.patience_s == patience_s / 4

    on_a_clock(run(), frozen=True)


def test_a_server_that_takes_one_at_a_time_is_asked_one_thing_at_a_time() -> None:
    async def run() -> None:
        limiter = ConnectionLimiter(64)
        limiter.narrow(1)
        limiter.narrow(8)
        requests = Requests(limiter)
        requests.start(0, 1)
        await clock().forward(0)
        assert requests.begun == [0]
        for end in requests.ends.values():
            end.set()
        await asyncio.gather(*requests.tasks.values())

    on_a_clock(run())
