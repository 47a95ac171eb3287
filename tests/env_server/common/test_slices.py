"""Work within the event loop, and those who have to wait for it: one client's thousand resets are not one turn."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tests.support.wire import Server, Socket

COUNT = 20
SLEEP = {"sleep": 0.01}
Ask = Callable[[Server, Socket, str], Awaitable[None]]


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
