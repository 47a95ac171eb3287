"""The adapter for OpenEnv's clients: one socket is one session, and errors have OpenEnv's codes."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
import websockets

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
            ("mcp", {"jsonrpc": "2.0", "method": "tools/list", "id": 1}, "UNKNOWN_TYPE"),
            ("step", None, "VALIDATION_ERROR"),
            ("step", {}, "VALIDATION_ERROR"),
            ("step", {"action": "a", "more": 1}, "VALIDATION_ERROR"),
            ("step", {"action": 5}, "VALIDATION_ERROR"),
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
        for body in ({}, {"action": "a"}, {"action": {"text": "a"}}, {"action": {"action": 3}}):
            refused = await client.post("/openenv/Count/step", json=body)
            assert (refused.status_code, bool(refused.json()["detail"])) == (422, True)
        assert (await client.get("/openenv/Count/state")).json() == {"episode_id": None, "step_count": 0}
        for path in ("health", "metadata", "schema", "state"):
            unknown = await client.get(f"/openenv/Coumt/{path}")
            assert (unknown.status_code, unknown.json()["suggestions"]) == (404, ["Count", "SlowCount"])
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
