"""What comes from a server that means no good: descriptions of spaces and problems."""

import asyncio
import json
from typing import Any

import pytest
from websockets.asyncio.server import ServerConnection, serve
from websockets.typing import Subprotocol

from rollgym.clients.client.client import EnvClient
from rollgym.clients.protocol.errors import ProblemError
from rollgym.clients.protocol.spaces import MAX_ELEMENTS, DecodeError, parse_space

BOX = {"type": "Box", "low": 0, "high": 1, "dtype": "float32"}


@pytest.mark.parametrize(
    "description",
    [
        {**BOX, "shape": [20_000, 20_000]},
        {**BOX, "shape": [2**31 - 1] * 1000},
        {**BOX, "shape": [-(2**30), 2]},
        {"type": "MultiBinary", "n": 10**12},
        {"type": "MultiBinary", "n": [10**6, 10**6]},
        {"type": "Text", "min_length": 0, "max_length": 10**12, "charset": "a"},
        {"type": "Tuple", "spaces": [{**BOX, "shape": [MAX_ELEMENTS // 2]}] * 3},
        {"type": "Dict", "spaces": {str(part): {**BOX, "shape": [MAX_ELEMENTS // 8]} for part in range(9)}},
        {"type": "Sequence", "space": {**BOX, "shape": [MAX_ELEMENTS + 1]}},
        {"type": "Graph", "node_space": {**BOX, "shape": [MAX_ELEMENTS + 1]}, "edge_space": None},
        {**BOX, "shape": [2], "dtype": "object"},
        {**BOX, "shape": [2], "dtype": "U99999999"},
        {**BOX, "shape": [2], "dtype": ["float32"]},
        {**BOX, "shape": [1] * 100},
        {**BOX, "shape": "x"},
        {"type": ["Box"]},
        {"type": {}},
        {"type": "Dict", "spaces": []},
        {"type": "Discrete", "n": 10**30},
        {"type": "MultiDiscrete", "nvec": [10**30]},
    ],
    ids=lambda description: str(description)[:40],
)
def test_spaces_that_are_small_to_describe_and_large_to_build(description: dict[str, Any]) -> None:
    with pytest.raises(DecodeError):
        parse_space(description)


def test_spaces_in_spaces_without_end() -> None:
    space: dict[str, Any] = {"type": "Discrete", "n": 2}
    for _ in range(5000):
        space = {"type": "Tuple", "spaces": [space]}
    with pytest.raises(DecodeError):
        parse_space(space)


@pytest.mark.parametrize("problem", [None, 3, "busy", [], [1], {"code": []}, {"code": "nonsense"}, {}])
def test_what_is_no_problem_is_a_defect_of_the_server(problem: Any) -> None:
    assert ProblemError.from_problem(problem).code == "internal"


def test_members_of_a_problem_are_data() -> None:
    problem = {"code": "busy", "detail": "x", "self": 1, "cls": 2, "args": 3, "status": 200}
    error = ProblemError.from_problem(problem)
    assert (error.code, error.status, error.extra) == ("busy", 409, {"self": 1, "cls": 2, "args": 3})


async def test_a_problem_that_is_nested_deeply_is_an_answer_all_the_same() -> None:
    """Otherwise whoever asked would wait for ever, since the answer was taken and is told to nobody."""
    deep = "[" * 990 + "]" * 990

    async def answer(connection: ServerConnection) -> None:
        async for text in connection:
            frame = json.loads(text)
            await connection.send(f'{{"id": {frame["id"]}, "error": {{"code": "busy", "detail": {deep}}}}}')

    async with serve(answer, "127.0.0.1", 0, subprotocols=[Subprotocol("rollgym.v1.json")]) as server:
        port = server.sockets[0].getsockname()[1]
        async with asyncio.timeout(10):
            with pytest.raises(ProblemError, match="busy"):
                async with EnvClient(f"http://127.0.0.1:{port}", timeout_s=5) as client:
                    await client.env("Walk-v0")


@pytest.mark.parametrize("named", ["[1]", "{}", "true", "0.0", '"0"'])
async def test_an_answer_to_what_no_request_is_called_ends_the_connection(named: str) -> None:
    complaints: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))

    async def answer(connection: ServerConnection) -> None:
        async for _ in connection:
            await connection.send(f'{{"id": {named}, "ok": {{}}}}')

    async with serve(answer, "127.0.0.1", 0, subprotocols=[Subprotocol("rollgym.v1.json")]) as server:
        port = server.sockets[0].getsockname()[1]
        client = EnvClient(f"http://127.0.0.1:{port}", timeout_s=0.5, connect_timeout_s=0.5)
        with pytest.raises(ConnectionError):
            await client.env("Walk-v0")
        await client.close()
    assert complaints == []


@pytest.mark.parametrize(
    "answer",
    [
        *(
            {},
            {"envs": 5},
            {"envs": [{}]},
            {"results": None},
            {"results": [1]},
            {"results": [{"score": "NaN"}]},
        ),
        *({"results": []}, {"sessions": 1, "session_id": 5}, {"closed": "x"}),
    ],
)
async def test_an_answer_of_another_form_cannot_be_read(answer: Any) -> None:
    async def garbage(connection: ServerConnection) -> None:
        async for text in connection:
            await connection.send(json.dumps({"id": json.loads(text)["id"], "ok": answer}))

    async with serve(garbage, "127.0.0.1", 0, subprotocols=[Subprotocol("rollgym.v1.json")]) as server:
        port = server.sockets[0].getsockname()[1]
        async with EnvClient(f"http://127.0.0.1:{port}", timeout_s=5) as client:
            asked = [
                client.info(),
                client.envs(),
                client.env("Walk-v0"),
                client.make("Walk-v0"),
                client.make_many("Walk-v0", 2),
                client.verify("QA-v0", [{"response": "x"}]),
            ]
            for each in asked:
                with pytest.raises(DecodeError):
                    await each


async def test_an_answer_to_no_request_is_passed_over() -> None:
    async def answer(connection: ServerConnection) -> None:
        async for text in connection:
            await connection.send('{"id": null, "error": {"code": "invalid_request"}}')
            await connection.send(f'{{"id": {json.loads(text)["id"]}, "ok": {{"envs": []}}}}')

    async with serve(answer, "127.0.0.1", 0, subprotocols=[Subprotocol("rollgym.v1.json")]) as server:
        port = server.sockets[0].getsockname()[1]
        async with EnvClient(f"http://127.0.0.1:{port}", timeout_s=5) as client:
            assert await client.envs() == []


@pytest.mark.parametrize("reason", [["closed"], {}, None, 3])
def test_a_reason_that_is_no_text_is_left_out(reason: Any) -> None:
    problem = ProblemError.from_problem({"code": "session_gone", "detail": "it is away", "reason": reason})
    assert problem.extra == {}
