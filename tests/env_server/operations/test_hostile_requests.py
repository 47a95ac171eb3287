"""Requests that fit their schema and mean no good."""

import asyncio
import base64
from typing import Any

from rollgym.env_server.operations.idempotency import IdempotencyCache
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
            while (await client.get("/v1/info")).json()["capacity"]["sessions"] > before:
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
            assert "ok" in await socket.ask("step", session_id=made, action="a" * 60_000)
            # Quotation marks are two signs each in JSON, as which an episode is kept and sent.
            for passing in ("a" * 60_000, '"' * 20_000):
                problem = (await socket.ask("step", session_id=made, action=passing))["error"]
                assert (problem["code"], problem["limit"]) == ("too_large", 100_000)
            assert (await socket.call("step", session_id=made, action="b" * 39_000))["step"] == 2, (
                "nothing was lost"
            )
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


async def test_episodes_of_actions_that_no_portable_episode_has(server: Server) -> None:
    deep: Any = []
    for _ in range(400):
        deep = [deep]
    for binary, action in ((False, deep), (True, b"\xff")):
        async with server.socket(binary=binary) as socket:
            made = await socket.make()
            await socket.call("step", session_id=made, action="a")
            episode = await socket.call("episode", session_id=made)
            problem = (await socket.ask("restore", episode={**episode, "actions": [action]}))["error"]
            assert problem["code"] == "invalid_request"


async def test_kwargs_and_options_in_either_encoding_are_the_same_episode() -> None:
    """What a journal keeps and tells is JSON, whatever came."""
    arguments = ("--kwargs-schemas", 'CartPole-v1={"type": "object"}', "--gymnasium", "CartPole-v1")
    array = {"__nd__": ["float64", [2], b"\0" * 7 + b"\xf0" + b"\0" * 8]}
    with Server(*ENVS, *INLINE, *arguments) as open_to_all:
        async with open_to_all.socket(binary=True) as socket:
            made = await socket.call("make", env_id="Count", reset={"seed": 1, "options": {"array": array}})
            episode = await socket.call("episode", session_id=made["session_id"])
            assert episode["options"]["array"]["__nd__"] == [
                "float64",
                [2],
                base64.b64encode(array["__nd__"][2]).decode(),
            ]
            kwargs = {"render_mode": None, "sutton_barto_reward": {"__bytes__": ["x/y", b"\xff"]}}
            made = await socket.call("make", env_id="CartPole-v1", kwargs=kwargs)
            episode = await socket.call("episode", session_id=made["session_id"])
            assert episode["kwargs"]["sutton_barto_reward"] == {"__bytes__": ["x/y", "/w=="]}
            again = {**episode, "kwargs": kwargs}
            restored = await socket.call("restore", episode=again)
            episode = await socket.call("episode", session_id=restored["session_id"])
            assert episode["kwargs"]["sutton_barto_reward"] == {"__bytes__": ["x/y", "/w=="]}


async def test_a_request_that_has_just_failed_keeps_nobody_elses_from_being_forgotten() -> None:
    cache = IdempotencyCache(4)

    async def fail() -> None:
        raise RuntimeError

    failing = asyncio.create_task(cache.once("me", "make", "a", fail))
    # It is asked in one turn of the loop, and has failed in the next; who asked hears of it in the one after.
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    cache.forget("me", lambda opened: True)
    await asyncio.gather(failing, return_exceptions=True)


async def test_what_cannot_be_put_together_again_costs_one_operation() -> None:
    env = ("--env", "Tangled=tests.support.served_envs:Tangled", "--workers", "1")
    with Server(*ENVS, *env) as server:
        async with server.socket() as socket, asyncio.timeout(20):
            neighbour, tangled = await socket.make("Chance"), await socket.make("Tangled")
            answer = await socket.ask("step", session_id=tangled, action="a")
            assert answer["error"]["code"] == "env_error"
            assert (await socket.call("reset", session_id=tangled))["step"] == 0
            # It is not deterministic, and would be gone with the process.
            assert (await socket.call("step", session_id=neighbour, action="a"))["step"] == 1
