"""What becomes of many operations at once when one of them, or one frame, goes wrong."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from rollgym.clients.client.client import EnvClient
from rollgym.clients.client.session import EnvSession
from rollgym.clients.net.caller import ServerCalls
from rollgym.clients.net.connection import Reply
from rollgym.clients.protocol.errors import ProblemError
from tests.support.client_server import ServerProcess

Call = Callable[[ServerCalls, dict[str, Any], int | None, float], Awaitable[Reply]]
REALLY: Call = ServerCalls.call


@pytest.fixture
async def client(server: ServerProcess) -> AsyncIterator[EnvClient]:
    async with EnvClient(server.url) as client:
        yield client


async def walks(client: EnvClient, count: int) -> list[EnvSession]:
    sessions = await client.make_many("Walk-v0", count, {"risk": 0.0})
    await client.reset_many([(session, 0) for session in sessions])
    return sessions


def answers_with(monkeypatch: pytest.MonkeyPatch, change: Callable[[dict[str, Any], Any], Any]) -> None:
    """Have a server's answers changed before the client reads them."""

    async def call(
        caller: ServerCalls, fields: dict[str, Any], process: int | None, deadline: float
    ) -> Reply:
        reply = await REALLY(caller, fields, process, deadline)
        return reply._replace(payload=change(fields, reply.payload))

    monkeypatch.setattr(ServerCalls, "call", call)


def first_breaks(monkeypatch: pytest.MonkeyPatch, op: str) -> list[str]:
    """Have the connection break under the first call of an operation; gives the others that were answered."""
    answered: list[str] = []
    calls = 0

    async def call(
        caller: ServerCalls, fields: dict[str, Any], process: int | None, deadline: float
    ) -> Reply:
        nonlocal calls
        if fields["op"] != op:
            return await REALLY(caller, fields, process, deadline)
        calls += 1
        if calls == 1:
            raise ConnectionError("it broke")
        await asyncio.sleep(0.05)
        reply = await REALLY(caller, fields, None, deadline)
        answered.append(op)
        return reply

    monkeypatch.setattr(ServerCalls, "call", call)
    return answered


@pytest.mark.parametrize(
    "spoiled",
    [
        {"ok": {"observation": 3, "reward": 0.0, "terminated": False, "truncated": False, "step": 1}},
        {"ok": {"observation": "at 3"}},
        {"ok": ["at 3"]},
        {"ok": None},
        {"oh": 1},
        {"error": "no"},
        ["at 3"],
        None,
    ],
    ids=str,
)
async def test_an_answer_that_cannot_be_read_is_the_problem_of_one_operation(
    client: EnvClient, monkeypatch: pytest.MonkeyPatch, spoiled: Any
) -> None:
    sessions = await walks(client, 3)
    answers_with(monkeypatch, lambda fields, payload: [payload[0], spoiled, payload[2]])
    results = await client.step_many([(session, "left") for session in sessions])
    assert isinstance(results[1], ProblemError)
    assert results[1].code == "internal"
    assert results[0] == results[2]
    assert [session.step_index for session in sessions] == [1, 0, 1]
    monkeypatch.undo()
    again = await client.step_many([(sessions[1], "left")])
    assert again == [results[0]]


async def test_an_answer_that_cannot_be_read_is_so_too_where_the_operation_was_asked_alone(
    client: EnvClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(fields: dict[str, Any], payload: Any) -> Any:
        if fields["op"] == "batch":
            return [payload[0], {"error": {"code": "at_capacity", "detail": "later"}}, payload[2]]
        return payload | {"observation": 3}

    sessions = await walks(client, 3)
    answers_with(monkeypatch, change)
    results = await client.step_many([(session, "left") for session in sessions])
    assert [isinstance(result, ProblemError) for result in results] == [False, True, False]
    assert "cannot be read" in str(results[1])


async def test_what_a_server_puts_off_of_a_batch_is_asked_again_in_one_batch(
    client: EnvClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = {"error": {"code": "overloaded", "detail": "later", "retry_after": 0}}
    sizes = []

    def put_off(fields: dict[str, Any], payload: Any) -> Any:
        sizes.append(len(fields["ops"]))
        return payload if len(sizes) > 1 else [payload[0], later, later]

    sessions = await walks(client, 3)
    answers_with(monkeypatch, put_off)
    results = await client.step_many([(session, "left") for session in sessions])
    assert results == [results[0]] * 3
    assert not isinstance(results[0], ProblemError)
    assert sizes == [3, 2]
    assert client.backpressure.overloaded == 1


@pytest.mark.parametrize("payload", [[], [{}] * 4, {"ok": 1}, None], ids=str)
async def test_a_batch_that_is_answered_with_something_else_is_a_problem_of_each(
    client: EnvClient, monkeypatch: pytest.MonkeyPatch, payload: Any
) -> None:
    sessions = await walks(client, 3)
    answers_with(monkeypatch, lambda fields, _: payload)
    results = await client.step_many([(session, "left") for session in sessions])
    assert [getattr(result, "code", None) for result in results] == ["internal"] * 3


async def test_a_frame_that_is_lost_is_told_when_the_others_are_answered(
    client: EnvClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions = await walks(client, 4)
    monkeypatch.setattr(client._pool, "max_batch", 2)
    first_breaks(monkeypatch, "batch")
    with pytest.raises(ConnectionError, match="it broke"):
        await client.step_many([(session, "left") for session in sessions])
    assert [session.step_index for session in sessions] == [0, 0, 1, 1]


async def test_nothing_is_verified_behind_the_back_of_whoever_was_told_of_an_error(
    client: EnvClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    await client.info()
    monkeypatch.setattr(client._pool, "max_batch", 1)
    answered = first_breaks(monkeypatch, "verify")
    with pytest.raises(ConnectionError, match="it broke"):
        await client.verify("Spelling-v0", [{"response": "a", "word": "a"}] * 3)
    assert len(answered) == 2


async def test_nothing_is_closed_behind_the_back_of_whoever_was_told_of_an_error(
    client: EnvClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions = await walks(client, 3)
    for process, session in enumerate(sessions):
        session.process = process
    answered = first_breaks(monkeypatch, "close")
    with pytest.raises(ConnectionError, match="it broke"):
        await client.close_sessions(sessions)
    assert len(answered) == 2
