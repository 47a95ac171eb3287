"""The adapter for OpenEnv's clients: one socket is one session, and errors have OpenEnv's codes."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
import websockets

from rollgym.env_server.protocols.openenv_forms import class_name
from tests.support.client_server import ServerProcess
from tests.support.wire import Server


class OpenEnv:
    """A client's end of one socket."""

    def __init__(self, connection: websockets.ClientConnection) -> None:
        self.connection = connection

    async def ask(self, kind: Any, data: Any = None) -> dict[str, Any]:
        """Send a message; gives its answer, good or not."""
        await self.connection.send(json.dumps({"type": kind} | ({} if data is None else {"data": data})))
        return await self.answer()

    async def answer(self) -> dict[str, Any]:
        async with asyncio.timeout(30):
            return json.loads(await self.connection.recv())

    async def good(self, kind: str, data: Any = None) -> dict[str, Any]:
        found = await self.ask(kind, data)
        assert found["type"] == ("state" if kind == "state" else "observation"), found
        return found["data"]

    async def code(self, kind: Any, data: Any = None) -> str:
        found = await self.ask(kind, data)
        assert found["type"] == "error", found
        assert found["data"]["message"]
        return found["data"]["code"]


@asynccontextmanager
async def openenv(server: Server, env_id: str, token: str | None = None) -> AsyncIterator[OpenEnv]:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    url = f"ws://127.0.0.1:{server.port}/openenv/{env_id}/ws"
    async with websockets.connect(url, additional_headers=headers, max_size=None) as connection:
        yield OpenEnv(connection)


async def sessions(server: Server, token: str | None = None) -> list[dict[str, Any]]:
    async with server.http(token) as client:
        found: list[dict[str, Any]] = (await client.get("/v1/sessions")).json()["sessions"]
        return found


async def until_none_is_left(server: Server, token: str | None = None) -> None:
    async with asyncio.timeout(10):
        while await sessions(server, token):
            await asyncio.sleep(0.02)


async def test_an_episode_is_that_of_our_own_protocol(anywhere: Server) -> None:
    async with anywhere.socket() as ours:
        session = await ours.call("make", env_id="Count", reset={"seed": 4})
        steps = [
            await ours.call("step", session_id=session["session_id"], action=text) for text in ("é", "b", "c")
        ]
        await ours.call("close", session_id=session["session_id"])
    async with openenv(anywhere, "Count") as env:
        began = await env.good("reset", {"seed": 4, "episode_id": "one", "unknown": 1})
        assert (began["reward"], began["done"]) == (None, False)
        assert began["observation"]["text"] == session["reset"]["observation"]
        assert began["observation"]["info"] == session["reset"]["info"]
        assert began["metadata"]["seed"] == 4
        for text, step in zip(("é", "b", "c"), steps, strict=True):
            seen = await env.good("step", {"action": text})
            assert seen["observation"]["text"] == step["observation"]
            assert seen["observation"]["info"] == step["info"]
            assert (seen["reward"], seen["done"]) == (step["reward"], step["terminated"])
        assert seen["metadata"] == {"terminated": True, "truncated": False, "episode": 0, "step": 3}
        state = await env.good("state")
        assert (state["episode_id"], state["step_count"], state["seed"]) == ("one", 3, 4)
        assert await env.code("step", {"action": "d"}) == "EXECUTION_ERROR"
        assert (await env.good("reset", {}))["metadata"]["episode"] == 1, "without a seed one is drawn"
        assert (await env.good("state"))["episode_id"].endswith(".1")


async def test_what_is_no_text_is_a_value(plain: Server) -> None:
    async with openenv(plain, "Arrays") as env:
        began = await env.good("reset", {"seed": 1})
        value = began["observation"]["value"]
        assert value["wide"][:2] == ["NaN", "Infinity"]
        assert value["picture"]["__nd__"][:2] == ["uint8", [40, 40]]
        step = await env.good("step", {"action": {"push": [0.5, 0.25], "key": 2}, "metadata": {"a": 1}})
        assert step["reward"] == 0.75
        assert await env.code("step", {"action": {"push": [0.5, 0.25], "key": 7}}) == "VALIDATION_ERROR"
        assert (await env.good("state"))["step_count"] == 1, "the episode goes on unharmed"


async def test_every_message_is_answered_and_none_ends_the_session(plain: Server) -> None:
    async with openenv(plain, "Count") as env:
        assert (await env.good("state"))["step_count"] == 0
        assert await env.code("step", {"action": "early"}) == "EXECUTION_ERROR"
        await env.good("reset", {"seed": 1})
        for kind, data, code in (
            ("nonsense", None, "UNKNOWN_TYPE"),
            (None, None, "UNKNOWN_TYPE"),
            ("step", None, "VALIDATION_ERROR"),
            ("step", {}, "VALIDATION_ERROR"),
            ("step", {"action": "a", "more": 1}, "VALIDATION_ERROR"),
            ("step", {"type": "list_tools", "action": "a"}, "VALIDATION_ERROR"),
            ("step", {"type": "call_tool", "arguments": {}}, "VALIDATION_ERROR"),
            ("step", {"type": "call_tool", "tool_name": 5}, "VALIDATION_ERROR"),
            ("reset", {"split": "train", "index": -1}, "VALIDATION_ERROR"),
            ("reset", {"split": "dev", "index": 1}, "VALIDATION_ERROR"),
            ("reset", {"seed": -1}, "VALIDATION_ERROR"),
            ("reset", {"seed": 1, "episode_id": "x" * 256}, "VALIDATION_ERROR"),
            ("reset", [], "VALIDATION_ERROR"),
            ("reset", {"options": {"expert": True}}, "EXECUTION_ERROR"),
            ("step", {"action": "x" * 2_000_000}, "VALIDATION_ERROR"),
        ):
            assert await env.code(kind, data) == code, (kind, str(data)[:50])
        for text in ("not JSON", "[1]", '{"type": "state", "extra": 1}'):
            await env.connection.send(text)
            found = await env.answer()
            assert found["type"] == "error", text
        assert (await env.good("step", {"action": "a"}))["observation"]["text"] == "1 a"
        assert await env.code("step", {"action": "raise"}) == "EXECUTION_ERROR"
        found = await env.ask("step", {"action": "a"})
        assert found["data"]["problem"]["code"] == "not_reset"
        await env.good("reset", {"seed": 1})
        found = await env.ask("step", {"action": "large 9000000"})
        assert found["data"]["problem"]["code"] == "too_large"


async def test_messages_are_answered_in_their_order(plain: Server) -> None:
    async with openenv(plain, "SlowCount") as env:
        for data in ({"type": "reset", "data": {"kwargs": {"length": 100}}}, *[{"type": "state"}] * 3):
            await env.connection.send(json.dumps(data))
        for text in ("sleep 0.2", "a", "b"):
            await env.connection.send(json.dumps({"type": "step", "data": {"action": text}}))
        kinds = [(await env.answer())["type"] for _ in range(4)]
        assert kinds == ["observation", "state", "state", "state"]
        assert [(await env.answer())["data"]["observation"]["info"]["count"] for _ in range(3)] == [1, 2, 3]


async def test_kwargs_make_the_environment_anew(plain: Server) -> None:
    async with openenv(plain, "Count") as env:
        first = await env.good("state")
        await env.good("reset", {"kwargs": {"length": 1}})
        assert (await env.good("step", {"action": "a"}))["done"] is True
        await env.good("reset", {})
        assert (await env.good("step", {"action": "a"}))["done"] is True, "they hold until others come"
        second = await env.good("state")
        assert second["session_id"] != first["session_id"]
        assert [each["session_id"] for each in await sessions(plain)] == [second["session_id"]]
        await env.good("reset", {"kwargs": {"length": 2}})
        assert await env.code("reset", {"kwargs": {"length": 1000}}) == "VALIDATION_ERROR"
        assert (await env.good("step", {"action": "a"}))["done"] is False
        assert (await env.good("step", {"action": "a"}))["done"] is True, "its episode goes on unharmed"


async def test_kwargs_make_the_environment_anew_where_there_is_room_for_one(
    guarded: tuple[Server, dict[str, str]],
) -> None:
    server, tokens = guarded
    async with openenv(server, "Count", tokens["bob"]), openenv(server, "Count", tokens["alice"]) as env:
        await env.good("reset", {})
        await env.good("reset", {"kwargs": {"length": 1}})
        assert (await env.good("step", {"action": "a"}))["done"] is True


async def test_the_session_ends_with_its_socket(plain: Server) -> None:
    async with openenv(plain, "Count") as env:
        await env.good("reset", {})
        assert len(await sessions(plain)) == 1
        await env.connection.send('{"type": "close"}')
        with pytest.raises(websockets.ConnectionClosedOK):
            await env.answer()
        assert await sessions(plain) == [], "its place is free before the client hears of it"
    async with openenv(plain, "SlowCount") as env:
        await env.good("reset", {})
        await env.connection.send('{"type": "step", "data": {"action": "sleep 15"}}')
        async with asyncio.timeout(10):
            while (await sessions(plain))[0]["idle_s"] > 0.5:
                await asyncio.sleep(0.02)
        env.connection.transport.abort()
        # Well before the step would be done.
        await until_none_is_left(plain)


async def test_a_session_does_not_outlive_its_socket_in_a_journal(tmp_path: Path) -> None:
    """The process was killed, and nobody can come back for the session that the next one finds."""
    with ServerProcess(("--state-dir", str(tmp_path), "--linger-s", "0.5", "--log-level", "error")) as server:
        url = f"ws://127.0.0.1:{server.port}/openenv/FrozenLake-v0/ws"
        async with websockets.connect(url) as connection:
            await OpenEnv(connection).good("reset", {"seed": 1})
            server.kill()
        server.start()
        async with httpx.AsyncClient(base_url=server.url) as client, asyncio.timeout(20):
            while (await client.get("/v1/sessions")).json()["sessions"]:
                await asyncio.sleep(0.05)
            assert (await client.get("/v1/info")).json()["capacity"]["sessions"] == 0


async def test_no_room(guarded: tuple[Server, dict[str, str]]) -> None:
    server, tokens = guarded
    async with (
        openenv(server, "Count", tokens["alice"]),
        openenv(server, "Count", tokens["bob"]),
        openenv(server, "Count", tokens["alice"]) as late,
    ):
        told = await late.answer()
        assert told["type"] == "error"
        assert told["data"]["code"] == "CAPACITY_REACHED"
        assert (told["data"]["active_sessions"], told["data"]["max_sessions"]) == (2, 2)
        with pytest.raises(websockets.ConnectionClosed):
            await late.answer()
    await until_none_is_left(server, tokens["alice"])
    async with openenv(server, "Count", tokens["alice"]) as env:
        await env.good("reset", {})


async def test_an_environment_that_cannot_be_made() -> None:
    arguments = ("--env", "Once=tests.support.served_envs:Once", "--isolation", "Once=inline")
    with Server(*arguments) as server:
        async with openenv(server, "Once") as env:
            told = await env.answer()
            assert told["data"]["code"] == "FACTORY_ERROR"
            assert "there is only one" in told["data"]["message"]
            with pytest.raises(websockets.ConnectionClosed):
                await env.answer()


async def test_a_session_that_was_evicted(guarded: tuple[Server, dict[str, str]]) -> None:
    server, tokens = guarded
    async with openenv(server, "Count", tokens["alice"]) as env:
        await env.good("reset", {})
        await until_none_is_left(server, tokens["alice"])
        assert await env.code("step", {"action": "a"}) == "SESSION_ERROR"
        with pytest.raises(websockets.ConnectionClosed):
            await env.answer()


async def test_tokens(guarded: tuple[Server, dict[str, str]]) -> None:
    server, tokens = guarded
    for token, env_id, status in (
        (None, "Count", 401),
        ("wrong", "Count", 401),
        (tokens["node"], "Count", 403),
        (tokens["alice"], "Nothing", 404),
    ):
        with pytest.raises(websockets.InvalidStatus) as refused:
            async with openenv(server, env_id, token):
                pass
        assert refused.value.response.status_code == status
    async with openenv(server, "Count", tokens["alice"]) as env:
        session_id = (await env.good("state"))["session_id"]
        assert await sessions(server, tokens["bob"]) == []
        assert [each["session_id"] for each in await sessions(server, tokens["alice"])] == [session_id]
    async with server.http() as client:
        assert (await client.get("/openenv/Count/health")).json() == {"status": "healthy"}
        assert (await client.get("/openenv/Count/schema")).status_code == 401
        assert (await client.post("/openenv/Count/reset", json={})).status_code == 401


async def test_calls_over_http_leave_no_session(plain: Server) -> None:
    async with plain.http() as client:
        began = (await client.post("/openenv/Count/reset", json={"seed": 4})).json()
        again = (await client.post("/openenv/Count/reset", json={"seed": 4})).json()
        assert began == again
        stepped = await client.post(
            "/openenv/Count/step", json={"action": {"action": "a"}, "seed": 4, "kwargs": {"length": 1}}
        )
        assert (stepped.json()["observation"]["text"], stepped.json()["done"]) == ("1 a", True)
        raised = await client.post("/openenv/Count/step", json={"action": {"action": "raise"}})
        assert raised.status_code == 500
        assert "RuntimeError" in raised.json()["detail"]
        for body in ({}, {"action": "a"}, {"action": {"text": "a"}}):
            refused = await client.post("/openenv/Count/step", json=body)
            assert (refused.status_code, bool(refused.json()["detail"])) == (422, True)
        assert (await client.get("/openenv/Count/state")).json() == {"episode_id": None, "step_count": 0}
        for path in ("health", "metadata", "schema", "state"):
            unknown = await client.get(f"/openenv/Coumt/{path}")
            assert (unknown.status_code, unknown.json()["suggestions"]) == (404, ["Count"])
    assert await sessions(plain) == []


@pytest.mark.parametrize("env_id", ["Count", "Arrays"])
async def test_the_schemas_fit_what_goes_over_the_wire(plain: Server, env_id: str) -> None:
    action = {"Count": "a", "Arrays": {"push": [0.0, 0.0], "key": 1}}[env_id]
    async with plain.http() as client:
        schemas = (await client.get(f"/openenv/{env_id}/schema")).json()
        metadata = (await client.get(f"/openenv/{env_id}/metadata")).json()
    assert metadata["name"] == env_id
    async with openenv(plain, env_id) as env:
        jsonschema.validate({"action": action}, schemas["action"])
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({"act": action}, schemas["action"])
        for kind, name, data in (
            ("reset", "reset_observation", {}),
            ("step", "observation", {"action": action}),
        ):
            seen = await env.good(kind, data)
            observation = {**seen["observation"], "reward": seen["reward"], "done": seen["done"]}
            jsonschema.validate(observation, schemas[name])
        jsonschema.validate(await env.good("state"), schemas["state"])


def test_schemas_are_named_as_openenvs_classes_are() -> None:
    """Clients take an `Action`, a `CallToolAction` and a `ListToolsAction` for calls of tools."""
    for env_id, name in (
        ("FrozenLake-v0", "FrozenLake"),
        ("my.game_two-v12", "MyGameTwo"),
        ("v1", "V1"),
        ("-v1", "Env"),
        ("2048-v0", "Env2048"),
        ("CallTool-v0", "EnvCallTool"),
        ("list.tools", "EnvListTools"),
    ):
        assert class_name(env_id) == name


async def test_a_value_for_an_environment_of_text_is_its_text(plain: Server) -> None:
    """Clients read a reply such as 42 as JSON before they send it."""
    async with openenv(plain, "Count") as env:
        await env.good("reset", {"kwargs": {"length": 9}})
        for value, text in ((42, "42"), (1.5, "1.5"), (True, "true"), (None, "null"), ([1, 2], "[1,2]")):
            seen = await env.good("step", {"action": value})
            assert seen["observation"]["text"].partition(" ")[2] == text


TOOLS = [
    *("calculator", "search", "store_list", "store_get", "store_set"),
    *("store_delete", "date_add", "date_difference", "weekday", "take_action"),
]


async def test_tools_are_listed_and_called_on_the_socket(anywhere: Server) -> None:
    env_id = "ToolUse-v0"
    async with anywhere.http() as client:
        if (await client.get(f"/v1/envs/{env_id}")).status_code == 404:
            pytest.skip("the node serves the tests' environments alone")
    async with openenv(anywhere, env_id) as env:
        listed = await env.good("step", {"type": "list_tools"})
        assert (listed["reward"], listed["done"]) == (None, False)
        assert [tool["name"] for tool in listed["observation"]["tools"]] == TOOLS
        assert set(listed["observation"]["tools"][0]) == {"name", "description", "input_schema"}
        assert (await env.good("reset", {"seed": 3}))["metadata"]["seed"] == 3
        call = {"type": "call_tool", "tool_name": "calculator", "arguments": {"expression": "6*7"}}
        called = await env.good("step", call)
        assert called["observation"]["result"]["data"] == "42"
        assert (called["observation"]["error"], called["metadata"]["step"]) == (None, 1)
        unknown = await env.good("step", {**call, "tool_name": "../../etc/passwd"})
        assert unknown["observation"]["error"]["error_type"] == "tool_not_found"
        asked = {"jsonrpc": "2.0", "id": "a", "method": "tools/list"}
        await env.connection.send(json.dumps({"type": "mcp", "data": asked}))
        answer = await env.answer()
        assert (answer["type"], answer["data"]["id"]) == ("mcp", "a")
        assert [tool["name"] for tool in answer["data"]["result"]["tools"]] == TOOLS
        ended = {
            "type": "call_tool",
            "tool_name": "take_action",
            "arguments": {"action": "<answer>1</answer>"},
        }
        assert (await env.good("step", ended))["done"] is True
        assert await env.code("step", ended) == "EXECUTION_ERROR"
        wrong = await env.good("step", {**ended, "arguments": {}})
        assert wrong["observation"]["error"]["error_type"] == "invalid_args"


async def rpc(client: httpx.AsyncClient, env_id: str, method: str, **params: Any) -> dict[str, Any]:
    body = {"jsonrpc": "2.0", "id": 7, "method": method, "params": params}
    answer = await client.post(f"/openenv/{env_id}/mcp", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    assert (found["jsonrpc"], found["id"]) == ("2.0", 7)
    return found


async def test_a_session_that_was_made_over_http_is_shared_with_a_socket(plain: Server) -> None:
    """As OpenEnv's tool client does it: it begins episodes on the socket, and calls tools over HTTP."""
    async with plain.http() as client:
        session_id = (await rpc(client, "SlowCount", "openenv/session/create"))["result"]["session_id"]
        url = f"ws://127.0.0.1:{plain.port}/openenv/SlowCount/ws?session_id={session_id}"
        async with websockets.connect(url) as connection:
            env = OpenEnv(connection)
            assert (await env.good("reset", {"seed": 5}))["metadata"]["seed"] == 5
            assert await env.code("reset", {"kwargs": {"length": 2}}) == "VALIDATION_ERROR"
            listed = await rpc(client, "SlowCount", "tools/list", session_id=session_id)
            assert [tool["name"] for tool in listed["result"]["tools"]] == ["take_action"]
            call = {"name": "take_action", "arguments": {"action": "a"}, "session_id": session_id}
            assert (await rpc(client, "SlowCount", "tools/call", **call))["result"]["data"] == "1 a"
            assert (await env.good("state"))["step_count"] == 1
        # The session is the client's, who ends it.
        assert [each["session_id"] for each in await sessions(plain)] == [session_id]
        other = await rpc(client, "Count", "tools/list", session_id=session_id)
        assert other["error"]["data"]["code"] == "unknown_session"
        closed = await rpc(client, "SlowCount", "openenv/session/close", session_id=session_id)
        assert closed["result"] == {"session_id": session_id, "closed": True}
        gone = await rpc(client, "SlowCount", "openenv/session/close", session_id=session_id)
        assert gone["error"]["code"] == -32602
        async with websockets.connect(url) as connection:
            assert (await OpenEnv(connection).answer())["data"]["code"] == "SESSION_ERROR"
    assert await sessions(plain) == []


async def test_messages_over_http_that_name_no_session_leave_none(plain: Server) -> None:
    async with plain.http() as client:
        call = {"name": "take_action", "arguments": {"action": "a"}}
        assert (await rpc(client, "Count", "tools/call", **call))["result"]["data"] == "1 a"
        for method, params, code in (
            ("tools/call", {"name": "../x"}, -32602),
            ("tools/call", {}, -32602),
            ("tools/call", {"name": "take_action", "arguments": {"action": "raise"}}, -32000),
            ("tools/list", {"session_id": 5}, -32602),
            ("openenv/session/close", {}, -32602),
            ("resources/list", {}, -32601),
        ):
            assert (await rpc(client, "Count", method, **params))["error"]["code"] == code, method
        for content, code in (
            (b"{", -32700),
            (b"{}", -32600),
            (b"[]", -32600),
            (b"3", -32600),
            (b'{"jsonrpc": "2.0", "id": {}, "method": "tools/list"}', -32600),
            (b'{"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": []}', -32600),
            (b"[" * 10_000 + b"]" * 10_000, -32700),
        ):
            headers = {"Content-Type": "application/json"}
            answer = await client.post("/openenv/Count/mcp", content=content, headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (200, code), content[:50]
    assert await sessions(plain) == []


async def test_a_socket_of_json_rpc_is_one_session(plain: Server) -> None:
    url = f"ws://127.0.0.1:{plain.port}/openenv/Count/mcp"
    async with websockets.connect(url) as connection:
        for place in (1, 2, 3):
            params = {"name": "take_action", "arguments": {"action": "a"}}
            call = {"jsonrpc": "2.0", "id": place, "method": "tools/call", "params": params}
            await connection.send(json.dumps(call))
            answer = json.loads(await connection.recv())
            assert answer["id"] == place
            assert answer["result"]["data"].startswith(f"{place} a")
        assert "The episode has ended" in answer["result"]["data"]
        await connection.send("{")
        assert json.loads(await connection.recv())["error"]["code"] == -32700
    await until_none_is_left(plain)


async def test_a_task_is_what_a_reset_takes(plain: Server) -> None:
    async with plain.http() as client:
        base = "/openenv/FrozenLake-v0"
        assert (await client.get(f"{base}/list_environments")).json() == ["FrozenLake-v0"]
        splits = (await client.get(f"{base}/frozenlake-v0/splits")).json()
        assert {"name": "valid", "type": "validation"} in splits
        count = (await client.post(f"{base}/FrozenLake-v0/num_tasks", json={"split": "test"})).json()
        assert count == {"num_tasks": 10_000}
        some = {"split": "test", "start": -1}
        (last,) = (await client.post(f"{base}/FrozenLake-v0/task_range", json=some)).json()["tasks"]
        assert last["index"] == 9_999
        tasks = (await client.post(f"{base}/FrozenLake-v0/tasks", json={"split": "test"})).json()
        one = {"split": "test", "index": 4}
        task = (await client.post(f"{base}/FrozenLake-v0/task", json=one)).json()["task"]
        assert tasks["tasks"][4] == task
        assert (tasks["env_name"], task["task_id"]) == ("FrozenLake-v0", "test-4")
        whole, named = [(await client.post(f"{base}/reset", json=each)).json() for each in (task, one)]
        assert whole == named
        assert whole["metadata"]["seed"] == 4
        for path, body, status in (
            ("FrozenLake-v0/task", {"split": "test", "index": 10_000}, 422),
            ("FrozenLake-v0/task", {"split": "dev", "index": 1}, 422),
            ("FrozenLake-v0/tasks", {"split": "test", "more": 1}, 422),
            ("Sokoban-v0/tasks", {"split": "test"}, 404),
        ):
            assert (await client.post(f"{base}/{path}", json=body)).status_code == status
        assert (await client.get("/openenv/Count/Count/splits")).json() == [
            {"name": "train", "type": "train"}
        ]


async def test_an_environment_has_a_description_of_its_own(plain: Server) -> None:
    async with plain.http() as client:
        document = (await client.get("/openenv/Count/openapi.json")).json()
        told = {"title": "Count", "description": "Counts.", "version": "1.0.0"}
        assert document["info"] == told | {"license": {"name": "Apache-2.0", "identifier": "Apache-2.0"}}
        assert document["servers"] == [{"url": "/openenv/Count"}]
        assert {"/reset", "/step", "/state", "/mcp", "/{env_name}/tasks"} <= set(document["paths"])
        for methods in document["paths"].values():
            for called in methods.values():
                assert all(each["name"] != "env_id" for each in called.get("parameters", ()))
        named = set(re.findall(r"#/components/schemas/(\w+)", json.dumps(document)))
        assert named == set(document["components"]["schemas"])
        assert (await client.get("/openenv/Coumt/openapi.json")).status_code == 404
