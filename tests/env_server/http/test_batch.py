"""Batches: operations on one session are done in their order, whoever has the session and however many they name."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rollgym.env_server.http.batch import Unfinished, run_batch
from tests.support.wire import ENVS, INLINE, Server, Socket


@pytest.fixture(scope="module")
def gateway() -> Iterator[Server]:
    with Server("--gateway", "--allow-network", "loopback") as gateway:
        with Server("--no-builtin", *ENVS, *INLINE, "--register", gateway.url):
            yield gateway
        assert "failed inside the server" not in gateway.log()


@pytest.fixture(params=["server", "gateway"])
async def socket(request: pytest.FixtureRequest) -> AsyncIterator[Socket]:
    """A socket to a server that has the environments itself, or to one that passes them on."""
    asked: Server = request.getfixturevalue(request.param)
    async with asked.http() as http, asked.socket() as found, asyncio.timeout(60):
        for env_id in ("Count", "SlowCount"):
            while (await http.get(f"/v1/envs/{env_id}")).status_code != 200:
                await asyncio.sleep(0.05)
        yield found


async def test_one_session_many_times(socket: Socket) -> None:
    made = await socket.make("SlowCount")
    results = await socket.batch(
        {"op": "reset", "session_id": made, "seed": 3},
        {"op": "step", "session_id": made, "action": "sleep 0.2"},
        {"op": "step", "session_id": made, "action": "b"},
        {"op": "close", "session_id": made},
        {"op": "step", "session_id": made, "action": "c"},
    )
    assert [each["ok"]["step"] for each in results[:3]] == [0, 1, 2]
    assert results[3] == {"ok": {"closed": 1}}
    assert results[4]["error"]["code"] == "session_gone"


async def test_what_is_on_several_sessions_has_its_place_in_each(socket: Socket) -> None:
    slow, slower, inline = [await socket.make(each) for each in ("SlowCount", "SlowCount", "Count")]
    results = await socket.batch(
        {"op": "step", "session_id": slow, "action": "a"},
        {"op": "step", "session_id": slower, "action": "sleep 0.5"},
        {"op": "close", "session_ids": [slow, slower, inline]},
        {"op": "step", "session_id": inline, "action": "a"},
        {"op": "reset", "session_id": slower, "seed": 1},
    )
    assert [each["ok"]["step"] for each in results[:2]] == [1, 1]
    assert results[2] == {"ok": {"closed": 3}}
    assert [each["error"]["code"] for each in results[3:]] == ["session_gone"] * 2


def step(session_id: str) -> dict[str, Any]:
    return {"op": "step", "session_id": session_id}


def close(*session_ids: str) -> dict[str, Any]:
    return {"op": "close", "session_ids": list(session_ids)}


async def begun(ops: list[dict[str, Any]]) -> list[str]:
    """Begin a batch whose operations wait; gives the order in which they were asked for."""
    asked: list[str] = []

    async def answer() -> dict[str, Any]:
        await asyncio.sleep(0)
        return {}

    def call(_: Any, op: str, fields: dict[str, Any]) -> Any:
        asked.append(fields["session_id"] if op == "step" else "close")
        return answer()

    operations = SimpleNamespace(call=call, share_out=lambda *_: None)
    batch = run_batch(cast(Any, operations), cast(Any, None), ops)
    if isinstance(batch, Unfinished):
        await batch.begin()
        await batch.results()
    else:
        await cast(Any, batch)
    return asked


async def test_chains_that_are_joined_keep_the_order_of_the_batch() -> None:
    ops = [
        step("a"),
        step("b"),
        step("c"),
        close("a"),
        close("c", "b", "b"),
        step("b"),
        close("a", "d", "c"),
        step("d"),
    ]
    asked = await begun(ops)
    assert asked[:3] == ["a", "b", "c"], "these wait for nothing"
    assert asked[-2:] == ["close", "d"]
    assert sorted(asked) == ["a", "b", "b", "c", "close", "close", "close", "d"]


def one_session_named_often(size: int) -> list[dict[str, Any]]:
    return [*[step("a")] * size, close(*["a"] * 8 * size)]


def one_more_session_each_time(size: int) -> list[dict[str, Any]]:
    many = [f"s{number}" for number in range(20 * size)]
    return [
        step("a"),
        close("a", *many),
        *(op for number in range(size) for op in (step(f"t{number}"), close("a", f"t{number}"))),
    ]


@pytest.mark.parametrize("ops", [one_session_named_often, one_more_session_each_time])
async def test_what_is_on_many_sessions_takes_time_in_proportion(
    ops: Callable[[int], list[dict[str, Any]]],
) -> None:
    async def cost(size: int) -> float:
        batch = ops(size)
        begun_at = time.process_time()
        await begun(batch)
        return time.process_time() - begun_at

    if await cost(1_000) > 0.02:
        # Other processes slow down one or the other: the least of each is looked at again, a while, if need be.
        once = four_times = math.inf
        for _ in range(20):
            once, four_times = min(once, await cost(250)), min(four_times, await cost(1_000))
            if four_times < 8 * once + 0.02:
                break
        assert four_times < 8 * once + 0.02
