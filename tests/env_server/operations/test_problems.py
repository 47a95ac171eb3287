"""Every problem code, provoked over HTTP and over the socket."""

import asyncio
import json
import math
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import msgpack
import pytest

from rollgym.clients.protocol.episode import PortableEpisode
from rollgym.clients.protocol.errors import CODES
from rollgym.env_server.common.requests import episode_in_json
from tests.support.wire import ENVS, INLINE, Server, Socket

OTHER_ISSUES = {
    # Registration, the gateway and defects of our own: there is nothing here yet that could provoke them.
    *("unknown_registration", "env_exists", "spec_mismatch", "probe_failed", "upstream_error", "internal"),
}
JSON = {"Content-Type": "application/json"}
MSGPACK = {"Content-Type": "application/msgpack"}
Case = Callable[[Socket], Awaitable[dict[str, Any]]]


async def fresh(socket: Socket) -> str:
    return (await socket.call("make", env_id="Count"))["session_id"]


async def step(socket: Socket, session_id: str, action: Any = "go", **fields: Any) -> dict[str, Any]:
    return await socket.ask("step", session_id=session_id, action=action, **fields)


async def not_in_space(socket: Socket) -> dict[str, Any]:
    made = await socket.make("CartPole-v1")
    problem = await step(socket, made, 2)
    assert "ok" in await step(socket, made, 1), "the episode goes on unharmed"
    return problem


async def gone(socket: Socket) -> dict[str, Any]:
    made = await fresh(socket)
    assert await socket.call("close", session_id=made) == {"closed": 1}
    answer = await step(socket, made)
    assert answer["error"]["reason"] == "closed"
    return answer


async def over(socket: Socket) -> dict[str, Any]:
    made = await socket.make(kwargs={"length": 1})
    assert (await step(socket, made))["ok"]["terminated"]
    return await step(socket, made)


async def mismatch(socket: Socket) -> dict[str, Any]:
    made = await socket.make()
    await step(socket, made, step=0)
    answer = await step(socket, made, "other", step=0)
    assert (answer["error"]["episode"], answer["error"]["step"]) == (0, 1)
    return answer


async def busy(socket: Socket) -> dict[str, Any]:
    made = await socket.make("SlowCount")
    running = await socket.send("step", session_id=made, action="sleep 0.5")
    answer = await socket.ask("reset", session_id=made)
    assert "ok" in await socket.answer(running)
    return answer


async def another_request(socket: Socket) -> dict[str, Any]:
    request_id = f"one {id(socket)}"
    copied = await fresh(socket)
    for op, fields, other in (
        ("fork", {"session_id": copied, "count": 1}, {"count": 2}),
        ("restore", {"episode": await socket.call("episode", session_id=copied)}, {"idle_timeout_s": 5.0}),
        ("make", {"env_id": "Count", "kwargs": {"length": 2}}, {"kwargs": {"length": 3}}),
    ):
        first = await socket.call(op, **fields, request_id=request_id)
        again = await socket.call(op, **fields, request_id=request_id)
        assert again == first
        answer = await socket.ask(op, **(fields | other), request_id=request_id)
        assert answer["error"]["code"] == "request_mismatch", op
        opened = first.get("session_ids") or [first["session_id"]]
        assert await socket.call("close", session_ids=opened) == {"closed": 1}, "no other was opened"
    return answer


async def no_fork(socket: Socket) -> dict[str, Any]:
    return await socket.ask("fork", session_id=await socket.make("Chance"))


async def timeout(socket: Socket) -> dict[str, Any]:
    made = await socket.make("SlowCount")
    answer = await step(socket, made, "sleep 5", timeout_s=0.3)
    assert "ok" in await socket.ask("reset", session_id=made), "the session can be reset"
    return answer


async def raised(socket: Socket) -> dict[str, Any]:
    made = await socket.make()
    answer = await step(socket, made, "raise")
    assert answer["error"]["error_class"] == "RuntimeError"
    assert "secret" not in json.dumps(answer)
    assert "Traceback" not in json.dumps(answer)
    assert (await step(socket, made))["error"]["code"] == "not_reset"
    assert "ok" in await socket.ask("reset", session_id=made), "the session can be reset"
    return answer


ON_SOCKET: list[tuple[str, Case]] = [
    ("invalid_request", lambda socket: socket.ask("make", env_id=3)),
    ("unknown_op", lambda socket: socket.ask("walk")),
    ("invalid_action", not_in_space),
    ("invalid_kwargs", lambda socket: socket.ask("make", env_id="Count", kwargs={"data_dir": "/etc"})),
    ("unknown_env", lambda socket: socket.ask("make", env_id="Cuont")),
    ("unknown_session", lambda socket: step(socket, "0." + "0" * 32)),
    ("session_gone", gone),
    ("step_mismatch", mismatch),
    ("episode_over", over),
    ("busy", busy),
    ("request_mismatch", another_request),
    ("fork_unsupported", no_fork),
    ("not_stateless", lambda socket: socket.ask("verify", env_id="Count", items=[])),
    ("forbidden", lambda socket: socket.ask("make", env_id="Count", reset={"options": {"expert": True}})),
    ("too_large", lambda socket: socket.ask("make", env_id="x" * 2**20)),
    ("env_error", raised),
    ("step_timeout", timeout),
]


@pytest.mark.parametrize(("code", "case"), ON_SOCKET, ids=[code for code, _ in ON_SOCKET])
@pytest.mark.parametrize("binary", [False, True], ids=["json", "msgpack"])
async def test_on_the_socket(server: Server, code: str, case: Case, binary: bool) -> None:
    async with server.socket(binary=binary) as socket:
        witness = await socket.make(kwargs={"length": 5})
        problem = (await case(socket))["error"]
        assert problem["code"] == code, problem
        assert problem["status"] == CODES[code]
        assert {"type", "title", "detail"} <= problem.keys()
        assert (await socket.call("step", session_id=witness, action="still here"))["step"] == 1
        assert (await socket.call("close", session_id=witness))["closed"] == 1


async def test_a_step_before_reset(server: Server) -> None:
    async with server.socket() as socket:
        answer = await step(socket, await fresh(socket))
        assert answer["error"]["code"] == "not_reset"


OVER_HTTP: list[tuple[str, str, str, dict[str, Any]]] = [
    ("invalid_request", "POST", "/v1/sessions", {"json": {}}),
    ("invalid_request", "POST", "/v1/sessions", {"json": {"env_id": "Count", "colour": 1}}),
    ("invalid_request", "POST", "/v1/sessions", {"json": {"env_id": "Count", "count": "3"}}),
    ("invalid_request", "POST", "/v1/sessions", {"json": {"env_id": "Count", "reset": {"seed": -1}}}),
    ("invalid_request", "POST", "/v1/sessions", {"json": {"env_id": "Count", "reset": {"seed": 2**53}}}),
    ("invalid_request", "POST", "/v1/sessions", {"json": [1]}),
    ("invalid_request", "POST", "/v1/sessions", {"content": b"{", "headers": JSON}),
    ("invalid_request", "POST", "/v1/sessions", {"content": b"\xff", "headers": JSON}),
    ("invalid_request", "POST", "/v1/sessions", {"content": b"\xc1", "headers": MSGPACK}),
    ("invalid_request", "GET", "/v1/sessions?limit=0", {}),
    ("invalid_request", "GET", "/v1/sessions?colour=1", {}),
    ("invalid_request", "GET", "/v1/envs?kind=none", {}),
    ("invalid_request", "GET", "/v1/info?colour=1", {}),
    ("invalid_request", "GET", "/v1/envs/Count?kind=episodic", {}),
    ("invalid_request", "POST", "/v1/verify/Equal", {"json": {"items": [{"answer": "4"}]}}),
    ("unsupported_media_type", "POST", "/v1/sessions", {"content": b"a=b", "headers": {"Content-Type": "text/plain"}}),
    ("too_large", "POST", "/v1/sessions", {"content": b"[" + b"1," * 2**20}),
    ("not_found", "GET", "/v1/nothing", {}),
    ("method_not_allowed", "PUT", "/v1/sessions", {}),
    ("not_found", "GET", "/", {}),
    ("unknown_env", "POST", "/v1/sessions", {"json": {"env_id": "Nowhere"}}),
    ("unknown_env", "GET", "/v1/envs/Nowhere", {}),
    ("unknown_env", "POST", "/v1/verify/Nowhere", {"json": {"items": []}}),
    ("unknown_session", "GET", "/v1/sessions/none", {}),
    ("unknown_session", "POST", "/v1/sessions/9.0/step", {"json": {"action": ""}}),
    ("not_stateless", "POST", "/v1/verify/Count", {"json": {"items": []}}),
    ("invalid_kwargs", "POST", "/v1/sessions", {"json": {"env_id": "Count", "kwargs": {"length": "3"}}}),
    ("invalid_kwargs", "POST", "/v1/sessions", {"json": {"env_id": "Count", "kwargs": {"length": 13}}}),
    ("invalid_kwargs", "POST", "/v1/sessions", {"json": {"env_id": "CartPole-v1", "kwargs": {"render_mode": "human"}}}),
    ("env_error", "POST", "/v1/sessions", {"json": {"env_id": "Count", "reset": {"options": {"raise": 1}}}}),
]  # fmt: skip


@pytest.mark.parametrize(("code", "method", "path", "request_"), OVER_HTTP)
async def test_over_http(server: Server, code: str, method: str, path: str, request_: dict[str, Any]) -> None:
    async with server.http() as client:
        before = (await client.get("/v1/info")).json()["capacity"]["sessions"]
        answer = await client.request(method, path, **request_)
        check(answer, code)
        after = (await client.get("/v1/info")).json()["capacity"]["sessions"]
        assert after <= before, "nothing was made; those of tests before may have ended"


def check(answer: httpx.Response, code: str) -> dict[str, Any]:
    problem = answer.json()
    assert problem["code"] == code, problem
    assert answer.status_code == problem["status"] == CODES[code]
    assert answer.headers["content-type"] == "application/problem+json"
    if code in {"invalid_request", "invalid_kwargs"}:
        assert all({"field", "reason"} <= error.keys() for error in problem["errors"])
        assert problem["errors"]
    if code in {"rate_limited", "at_capacity", "draining"}:
        assert int(answer.headers["retry-after"]) == problem["retry_after"] > 0
    return problem


async def test_near_names_are_suggested(server: Server) -> None:
    async with server.http() as client:
        problem = check(await client.get("/v1/envs/SlowCuont"), "unknown_env")
        assert "SlowCount" in problem["suggestions"]
        assert "SlowCount" in problem["detail"]


async def test_a_body_that_grows_without_end_is_refused(server: Server) -> None:
    async def endless() -> Any:
        for _ in range(64):
            yield b" " * 65536

    async with server.http() as client:
        check(await client.post("/v1/sessions", content=endless()), "too_large")


async def test_limits_of_capacity_and_rate() -> None:
    with Server(
        *ENVS, *INLINE, "--max-sessions", "3", "--max-sessions-per-token", "2", "--rate-limit", "8"
    ) as server:
        async with server.http() as client:
            three = {"env_id": "Count", "count": 3}
            assert (
                check(await client.post("/v1/sessions", json=three), "at_capacity")["limit"]
                == "max_sessions_per_token"
            )
            made = (await client.post("/v1/sessions", json={"env_id": "Count", "count": 2})).json()[
                "sessions"
            ]
            check(await client.post("/v1/sessions", json={"env_id": "Count"}), "at_capacity")
            assert (await client.delete(f"/v1/sessions/{made[0]['session_id']}")).status_code == 204
            async with asyncio.timeout(30):
                # A slow machine sends fewer than eight a second one by one.
                while True:
                    answers = await asyncio.gather(*(client.get("/v1/info") for _ in range(32)))
                    refused = [answer for answer in answers if answer.status_code != 200]
                    if refused:
                        break
            check(refused[0], "rate_limited")


async def test_a_reply_over_the_limit() -> None:
    with Server(*ENVS, *INLINE, "--max-reply-bytes", "2000") as server:
        async with server.http() as client, server.socket() as socket:
            made = await socket.make(kwargs={"length": 9})
            problem = (await socket.ask("step", session_id=made, action="large 3000", step=0))["error"]
            assert problem["code"] == "too_large"
            check(await client.post(f"/v1/sessions/{made}/step", json={"action": "large 3000"}), "too_large")
            results = await socket.batch(
                {"op": "step", "session_id": made, "action": "small"},
                {"op": "step", "session_id": made, "action": "large 1900"},
                {"op": "step", "session_id": made, "action": "small"},
            )
            assert ["ok" in result for result in results] == [True, False, True]
            assert results[1]["error"]["code"] == "too_large"
            assert results[2]["ok"]["step"] == 5, "what was asked for was done all the same"


async def test_sessions_that_nobody_can_be_told_of_are_closed_again() -> None:
    unsendable = ("--env", "Unsendable=tests.support.served_envs:Unsendable")
    with Server(*ENVS, *INLINE, *unsendable, "--max-reply-bytes", "2000") as server:
        async with server.http() as client, server.socket() as socket:

            async def sessions() -> int:
                return (await client.get("/v1/info")).json()["capacity"]["sessions"]

            kept = await socket.make(kwargs={"length": 9})
            many = {"env_id": "Count", "count": 40}
            for _ in range(2):
                # One that came before does not come again with sessions that are no more.
                answer = await client.post("/v1/sessions", json=many | {"request_id": "many"})
                check(answer, "too_large")
                assert "closed" in answer.json()["detail"]
            assert (await socket.ask("make", **many))["error"]["code"] == "too_large"
            assert (await socket.ask("fork", session_id=kept, count=60))["error"]["code"] == "too_large"
            mcp = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {}}
            assert (await client.post("/mcp/Arrays", json=mcp)).status_code == 413
            results = await socket.batch(
                {"op": "make", "env_id": "Count"},
                {"op": "make", **many},
                {"op": "step", "session_id": kept, "action": "on"},
            )
            assert ["ok" in result for result in results] == [True, False, True]
            assert await sessions() == 2
            undescribable = await client.post(
                "/v1/sessions", json={"env_id": "Unsendable", "reset": {}, "request_id": "one"}
            )
            check(undescribable, "env_error")
            assert await sessions() == 2


WRONG_TYPES: list[tuple[str, dict[str, Any]]] = [
    *(("step", {"action": "a", "autoreset": wrong}) for wrong in ("yes", 1, "false", None)),
    *(
        ("step", {"action": "a", name: wrong})
        for name in ("step", "episode")
        for wrong in (-1, True, "0", 0.5)
    ),
    *(("step", {"action": "a", "timeout_s": wrong}) for wrong in (True, "5", 0, -1, math.nan, math.inf)),
    *(
        ("step", {"action": "a", "autoreset": True, "reset": {"seed": wrong}})
        for wrong in (True, "1", -1, 2**53)
    ),
    *(("reset", {"seed": wrong}) for wrong in (True, "1", 1.5, -1, 2**53)),
    *(("reset", {"again": wrong}) for wrong in ("yes", 1, None)),
    *(("reset", {"request_id": wrong}) for wrong in (b"one", 1, "")),
    *(("render", {"mode": wrong}) for wrong in (b"ansi", 1, True)),
    *(("fork", {"count": wrong}) for wrong in (True, "1", 0, 1.5)),
    *(("fork", {"reseed": wrong}) for wrong in (True, "1", 1.5)),
    *(("make", {"env_id": "Count", "count": wrong}) for wrong in (True, "1", 0, 2.5)),
    *(("make", {"env_id": "Count", "lingers": wrong}) for wrong in ("no", 0, None)),
    *(("make", {"env_id": "Count", "idle_timeout_s": wrong}) for wrong in (True, "9", math.nan, 0)),
    ("make", {"env_id": b"Count"}),
    ("make", {"env_id": "Count", "kwargs": [["length", 3]]}),
    *(("verify", {"env_id": "Equal", "items": [], "timeout_s": wrong}) for wrong in (True, "1", math.nan)),
    ("close", {"session_ids": [b"x"]}),
    ("close", {"session_ids": "x"}),
]


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "checked"])
async def test_a_field_of_another_type_is_refused(server: Server, fast: bool) -> None:
    async with server.socket(binary=True) as socket:
        made = await socket.make(kwargs={"length": 9})
        for op, fields in WRONG_TYPES:
            on_session = {"session_id": made} if op in ("step", "reset", "render", "fork") else {}
            # A time-out of a step's own has all its fields looked at by their model.
            slow = {"timeout_s": 5} if op == "step" and not fast else {}
            problem = (await socket.ask(op, **slow | on_session | fields)).get("error")
            assert problem is not None, (op, fields)
            assert problem["code"] == "invalid_request", (op, fields, problem)
            assert problem["errors"], (op, fields)
        assert (await socket.call("step", session_id=made, action="a", step=0))["step"] == 1, (
            "nothing was lost"
        )
        episode = await socket.call("episode", session_id=made)
        for name, wrong in (("episode", True), ("seed", "1"), ("kwargs", []), ("reseeds", [[0, True]])):
            problem = (await socket.ask("restore", episode=episode | {name: wrong}))["error"]
            assert problem["code"] == "invalid_request", (name, wrong, problem)


@pytest.mark.parametrize("options", [{"mapp": ["SG"]}, {"split": "train", "": 1}, {"expert": "yes"}])
async def test_options_that_there_are_not_are_refused_and_cost_nothing(
    server: Server, options: dict[str, Any]
) -> None:
    async with server.socket() as socket:
        made = await socket.make("FrozenLake-v0")
        begin = {"options": options}
        episode = await socket.call("episode", session_id=made)
        for op, fields in (
            ("reset", {"session_id": made, **begin}),
            ("step", {"session_id": made, "action": "Left", "autoreset": True, "reset": begin}),
            ("make", {"env_id": "FrozenLake-v0", "reset": begin}),
            ("restore", {"episode": episode | begin}),
        ):
            problem = (await socket.ask(op, **fields))["error"]
            assert problem["code"] == "invalid_request", (op, problem)
            assert "expert" in problem["detail"]
        assert (await socket.call("step", session_id=made, action="Left"))["step"] == 1
        declared = (await socket.call("envs", env_id="FrozenLake-v0"))["metadata"]["reset_options"]
        assert declared == ["expert", "map", "split"]


@pytest.mark.parametrize("env_id", ["Count", "SlowCount"])
async def test_options_may_be_refused_by_an_exception_that_is_a_value_error(
    server: Server, env_id: str
) -> None:
    async with server.socket() as socket:
        made = await socket.make(env_id)
        # `json.JSONDecodeError`, and `TypeError`.
        for wrong in ("{", 5):
            problem = (await socket.ask("reset", session_id=made, options={"json": wrong}))["error"]
            assert problem["code"] == "invalid_request", problem
            assert problem["errors"][0]["field"] == "options"
        problem = (await socket.ask("reset", session_id=made, options={"raise": True}))["error"]
        assert problem["code"] == "env_error"


async def test_kwargs_are_what_a_portable_episode_can_keep() -> None:
    arguments = ("--env", "Fragile=tests.support.fragile_envs:Fragile", "--isolation", "Fragile=inline")
    with Server(*arguments) as server:
        async with server.socket(binary=True) as socket:
            for value in (math.nan, -math.inf, b"bytes", [{"deep": math.nan}]):
                problem = (await socket.ask("make", env_id="Fragile", kwargs={"any": value}))["error"]
                assert problem["code"] == "invalid_kwargs"
                assert problem["errors"][0]["field"].startswith("kwargs")


def test_actions_are_what_a_portable_episode_can_keep() -> None:
    actions = [[math.inf, -math.inf, math.nan, 0.5], {"picture": {"__bytes__": ["image/png", b"x"]}}, "a"]
    digests = ["0" * 16] * len(actions)
    digest: dict[str, Any] = {"env_id": "E", "env_version": "1", "seed": 1, "reset_digest": digests[0]}
    kept = episode_in_json(PortableEpisode(**digest, actions=actions, digests=digests)).actions
    assert kept == [
        ["Infinity", "-Infinity", "NaN", 0.5],
        {"picture": {"__bytes__": ["image/png", "eA=="]}},
        "a",
    ]


async def test_names_that_are_no_texts_are_refused_wherever_they_are() -> None:
    wrong = {"any": {"a": {b"x": 1}}}
    any_schema = {"properties": {"a": {"additionalProperties": False}}}
    schemas = f"Fragile={json.dumps({'type': 'object', 'properties': {'any': any_schema}})}"
    arguments = ("--env", "Fragile=tests.support.fragile_envs:Fragile", "--isolation", "Fragile=inline")
    with Server(*ENVS, *arguments, "--kwargs-schemas", schemas) as server:
        async with server.socket(binary=True) as socket, server.http() as client:
            begin = {"seed": 1, "options": wrong}
            fragile, count = await socket.make("Fragile"), await socket.make("Count")
            for op, fields, code in (
                ("make", {"env_id": "Fragile", "kwargs": wrong}, "invalid_kwargs"),
                ("make", {"env_id": "Fragile", "reset": begin}, "invalid_request"),
                ("reset", {"session_id": fragile, "options": wrong}, "invalid_request"),
                ("reset", {"session_id": count, "options": wrong}, "invalid_request"),
                ("step", {"session_id": fragile, "action": wrong}, "invalid_action"),
                ("verify", {"env_id": "Equal", "items": [{"response": "a"} | wrong]}, "invalid_request"),
            ):
                problem = (await socket.ask(op, **fields))["error"]
                assert problem["code"] == code, (op, problem)
            content = msgpack.packb({"env_id": "Fragile", "kwargs": wrong})
            answer = await client.post("/v1/sessions", content=content, headers=MSGPACK)
            assert (answer.status_code, answer.json()["code"]) == (422, "invalid_kwargs")
        assert "failed inside the server" not in server.log()


def test_the_table_is_complete() -> None:
    elsewhere = {"unauthorized", "draining", "overloaded"}  # test_auth, test_drain, test_overload
    provoked = {code for code, _ in ON_SOCKET} | {code for code, *_ in OVER_HTTP}
    known = provoked | {"not_reset", "at_capacity", "rate_limited"} | elsewhere | OTHER_ISSUES
    assert set(CODES) - known == set(), (
        "provoke them in ON_SOCKET or OVER_HTTP, or say above where that is done"
    )
    assert known - set(CODES) == set(), "there are no such codes"
