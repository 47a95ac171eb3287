"""Batches: operations on one session are done in their order, whoever has the session and however many they name."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

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
