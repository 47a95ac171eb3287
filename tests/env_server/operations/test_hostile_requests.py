"""Requests that fit their schema and mean no good."""

import asyncio
from typing import Any

from env_server.operations.idempotency import IdempotencyCache
from tests.support.wire import ENVS, INLINE, Server


async def test_time_outs_too_short_for_a_clock(server: Server) -> None:
    """A deadline that has passed when it is set is one all the same, and harms nobody else."""
    item = {"response": "4", "answer": "4"}
    async with server.http() as client, server.socket() as socket:
        for timeout_s in (3e-153, 1e-9, 1e-6):
            answer = await client.post(
                "/v1/verify/Equal", json={"items": [item] * 4, "timeout_s": timeout_s}, timeout=60
            )
            assert answer.status_code == 200
            assert {each["outcome"] for each in answer.json()["results"]} <= {"correct", "timeout"}
            made = await socket.make("SlowCount")
            step = await socket.ask("step", session_id=made, action="a", timeout_s=timeout_s)
            assert "ok" in step or step["error"]["code"] == "step_timeout"
            assert (await socket.call("reset", session_id=made))["step"] == 0
            await socket.call("close", session_id=made)
        verdicts = (await socket.call("verify", env_id="Equal", items=[item] * 4))["results"]
        assert {each["outcome"] for each in verdicts} == {"correct"}


async def test_idle_times_too_short_for_a_clock(server: Server) -> None:
    async with server.http() as client:
        before = (await client.get("/v1/info")).json()["capacity"]["sessions"]
        for idle_timeout_s in (3e-153, 1e-9):
            body = {"env_id": "Count", "idle_timeout_s": idle_timeout_s, "count": 3}
            assert (await client.post("/v1/sessions", json=body)).status_code == 201
        async with asyncio.timeout(30):
            while (await client.get("/v1/info")).json()["capacity"]["sessions"] != before:
                await asyncio.sleep(0.01)


async def test_ids_that_no_environment_has_are_not_looked_up(server: Server) -> None:
    """Near names are found by comparing, which takes long for long names."""
    async with server.http() as client, server.socket() as socket:
        long = "x" * 500_000
        for answer in (
            (await socket.ask("envs", env_id=long))["error"],
            (await socket.ask("verify", env_id=long, items=[]))["error"],
            (await client.get("/v1/envs", params={"env_id": "ü"})).json(),
        ):
            assert answer["code"] == "unknown_env"
            assert len(str(answer)) < 1000
        problem = (await socket.ask("step", session_id=long, action="a"))["error"]
        assert problem["code"] == "unknown_session"
        assert len(str(problem)) < 1000


async def test_no_operation_is_named_by_something_deep(server: Server) -> None:
    deep: Any = []
    for _ in range(900):
        deep = [deep]
    for binary in (False, True):
        async with server.socket(binary=binary) as socket:
            depth = deep
            if binary:
                for _ in range(600):
                    depth = depth[0]
            assert (await socket.ask(depth))["error"]["code"] == "unknown_op"
            assert (await socket.batch({"op": depth}, {"op": {}}, 3))[0]["error"]["code"] == "invalid_request"
            assert (await socket.ask("x" * 100_000))["error"]["code"] == "unknown_op"


async def test_an_episode_s_actions_are_bounded() -> None:
    with Server(*ENVS, *INLINE, "--max-episode-bytes", "100000") as server:
        async with server.socket() as socket:
            made = await socket.make(kwargs={"length": 100})
            for _ in range(2):
                assert "ok" in await socket.ask("step", session_id=made, action="a" * 60_000)
            problem = (await socket.ask("step", session_id=made, action="b"))["error"]
            assert (problem["code"], problem["limit"]) == ("too_large", 100_000)
            await socket.call("reset", session_id=made)
            assert (await socket.call("step", session_id=made, action="b"))["step"] == 1


async def test_remembered_answers_are_bounded_for_each_token() -> None:
    made = 0

    async def make(count: int) -> list[int]:
        nonlocal made
        made += 1
        return [made] * count

    answers = IdempotencyCache(10)
    first = await answers.once("alice", "make", "1", lambda: make(4))
    assert await answers.once("alice", "make", "1", lambda: make(4)) == first
    for number in range(100):
        await answers.once("bob", "make", str(number), lambda: make(4))
    assert await answers.once("alice", "make", "1", lambda: make(4)) == first, "not forgotten for another's"
    large = await answers.once("alice", "make", "2", lambda: make(1000))
    assert await answers.once("alice", "make", "2", lambda: make(1000)) == large, "the newest is kept"
    assert await answers.once("alice", "make", "1", lambda: make(4)) != first


async def test_refusing_a_long_list_ends_at_its_first_fault(server: Server) -> None:
    """A megabyte of wrong entries has a hundred thousand faults, each of which would be told apart and described."""
    async with server.socket() as socket:
        episode = await socket.call("episode", session_id=await socket.make())
        wrong = [[""]] * 100_000
        for op, fields in (
            ("close", {"session_ids": wrong}),
            ("verify", {"env_id": "Equal", "items": wrong}),
            ("restore", {"episode": episode | {"digests": wrong}}),
            ("restore", {"episode": episode | {"reseeds": wrong}}),
        ):
            problem = (await socket.ask(op, **fields))["error"]
            assert problem["code"] == "invalid_request"
            assert len(problem["errors"]) <= 2, op


async def test_what_was_sent_is_not_sent_back_in_full(server: Server) -> None:
    long = "x" * 900_000
    async with server.socket() as socket:
        made = await socket.make()
        episode = await socket.call("episode", session_id=made)
        for op, fields in (
            ("make", {"env_id": "Count", long: 1}),
            ("make", {"env_id": "Count", "kwargs": {long: 1}}),
            ("make", {"env_id": "Count", "reset": {long: 1}}),
            ("cancel", {"session_id": made, long: 1}),
            ("reset", {"session_id": made, "options": {long: 1}}),
            ("restore", {"episode": episode | {"env_version": long}}),
            ("restore", {"episode": episode | {long: 1}}),
            ("batch", {"ops": [], long: 1}),
        ):
            answer = await socket.ask(op, **fields)
            assert len(str(answer)) < 2000, (op, list(fields))


async def test_options_that_an_environment_refuses_are_the_client_s_fault(server: Server) -> None:
    """`sleep` wants a number from 0 on; what the environment raises says so, and it can be reset again."""
    for env_id in ("Count", "SlowCount"):
        async with server.socket() as socket:
            made = await socket.make(env_id)
            for wrong in (-1, "long"):
                begin = {"seed": 1, "options": {"sleep": wrong}}
                for answer in (
                    await socket.ask("reset", session_id=made, **begin),
                    await socket.ask("make", env_id=env_id, reset=begin),
                ):
                    assert answer["error"]["code"] == "invalid_request", answer
                    assert answer["error"]["errors"][0]["field"] == "options"
                assert (await socket.call("reset", session_id=made))["step"] == 0
            failed = await socket.ask("reset", session_id=made, options={"raise": 1})
            assert failed["error"]["code"] == "env_error", "a failure is the environment's all the same"
