"""Registered OpenEnv servers that do not do what they should."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest

from rollgym.clients.client.client import EnvClient
from rollgym.clients.protocol.errors import ProblemError
from tests.support.client_server import ServerProcess
from tests.support.scripted_openenv import (
    ScriptedOpenEnv,
    hang,
    hang_up,
    observation,
    refusing,
    saying,
    scripted_openenv,
)

LIMIT = 100_000


@pytest.fixture(scope="module")
def gateway() -> Iterator[ServerProcess]:
    arguments = ("--gateway", "--allow-network", "loopback", "--log-level", "error", "--step-timeout-s", "1")
    with ServerProcess((*arguments, "--max-reply-bytes", str(LIMIT))) as running:
        yield running


@pytest.fixture
async def http(gateway: ServerProcess) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as client:
        yield client


@pytest.fixture
async def scripted() -> AsyncIterator[ScriptedOpenEnv]:
    async with scripted_openenv() as server:
        yield server


async def register(
    http: httpx.AsyncClient, url: str, env_id: str = "Scripted", **fields: Any
) -> dict[str, Any]:
    body = {"env_id": env_id, "url": url, "protocol": "openenv", **fields}
    reply: dict[str, Any] = (await http.post("/v1/envs", json=body)).json()
    return reply


async def unregister(http: httpx.AsyncClient, registered: dict[str, Any]) -> None:
    answer = await http.delete(f"/v1/registrations/{registered['registration_id']}")
    assert answer.status_code == 204


async def test_what_a_registration_says(http: httpx.AsyncClient, scripted: ScriptedOpenEnv) -> None:
    registered = await register(http, scripted.url, token="secret")
    checks = [check["check"] for check in registered["report"]]
    assert checks[-1] == "two resets with one seed agree"
    assert scripted.seen.count("close") == 2, "the probe leaves nothing behind"
    assert scripted.handshakes[0]["Host"] == scripted.url.removeprefix("http://")
    assert scripted.handshakes[0]["Authorization"] == "Bearer secret"
    info = (await http.get("/v1/envs/Scripted")).json()
    assert (info["version"], info["description"]) == ("3", "As a test says.")
    assert (info["action_space"], info["deterministic"]) == ({"type": "UnicodeText"}, False)
    assert info["metadata"]["openenv"]["action"]["required"] == ["move"]
    await unregister(http, registered)


MCP_SCHEMAS = {
    "action": {
        "title": "CallToolAction",
        "type": "object",
        "properties": {"type": {"const": "call_tool"}, "tool_name": {"type": "string"}, "arguments": {}},
        "required": ["tool_name"],
    },
    "observation": {
        "title": "CallToolObservation",
        "type": "object",
        "properties": {"tool_name": {"type": "string"}, "result": {}, "metadata": {"type": "object"}},
        "required": ["tool_name"],
    },
}


@pytest.mark.parametrize(
    ("fields", "began", "called"),
    [
        ({}, {"status": "ready"}, {"tool_name": "echo", "result": "hi"}),
        ({"observation_field": "result"}, {"status": "ready"}, "hi"),
        ({"observation_field": "metadata"}, {"status": "ready"}, {}),
    ],
)
async def test_an_mcp_environment_registers_and_is_played(
    gateway: ServerProcess,
    http: httpx.AsyncClient,
    scripted: ScriptedOpenEnv,
    fields: dict[str, str],
    began: Any,
    called: Any,
) -> None:
    """As recorded of OpenEnv 0.10.0's `create_app(EchoEnvironment, CallToolAction, CallToolObservation)`."""
    scripted.page("/schema", MCP_SCHEMAS)
    ready = {"observation": {"metadata": {"status": "ready"}}, "reward": 0.0, "done": False}
    heard: list[Any] = []

    async def call(connection: Any, message: dict[str, Any]) -> None:
        heard.append(message["data"])
        seen = {"tool_name": "echo", "result": "hi", "metadata": {}}
        data = {"observation": seen, "reward": None, "done": False}
        await connection.send(json.dumps({"type": "observation", "data": data}))

    scripted.scripts |= {"reset": saying({"type": "observation", "data": ready}), "step": call}
    registered = await register(http, scripted.url, **fields)
    async with EnvClient(gateway.url, timeout_s=40) as client:
        session = await client.make("Scripted")
        assert json.loads((await session.reset(seed=1)).observation) == began
        action = {"type": "call_tool", "tool_name": "echo", "arguments": {"message": "hi"}}
        seen = (await session.step(json.dumps(action))).observation
        assert (seen if isinstance(called, str) else json.loads(seen)) == called
        assert heard[-1] == action
        await session.close()
    await unregister(http, registered)


async def test_fields_are_named_for_openenv_only(http: httpx.AsyncClient, scripted: ScriptedOpenEnv) -> None:
    refused = await register(http, scripted.url, action_field="speed")
    assert refused["code"] == "probe_failed"
    assert "it has move" in refused["detail"]
    refused = await register(http, scripted.url, protocol="http", action_field="move")
    assert (refused["code"], refused["errors"][0]["field"]) == ("invalid_request", "action_field")
    registered = await register(http, scripted.url, action_field="move")
    await unregister(http, registered)


# A field that is only guessed from the schema may be missing, an observation may not.
BAD = {"type": "observation", "data": {"done": False}}


@pytest.mark.parametrize(
    ("kind", "script", "check", "detail"),
    [
        ("open", hang_up, "make", "ended the socket"),
        ("open", refusing("SESSION_ERROR", "not now"), "make", "not now"),
        ("open", refusing("FACTORY_ERROR", "cannot build"), "make", "cannot build"),
        ("state", saying("not JSON"), "make", "no JSON"),
        ("state", saying('"text"'), "make", "no object"),
        ("reset", saying(BAD), "reset", "no observation"),
        ("reset", refusing("EXECUTION_ERROR", "out of levels"), "reset", "out of levels"),
        ("reset", saying(observation("x" * (LIMIT + 1))), "reset", "ended the socket"),
        ("step", saying(observation("on", reward="much")), "step", "not a finite number"),
        ("step", saying(observation("on", done="no")), "step", "no boolean"),
        ("step", hang_up, "step", "ended the socket"),
    ],
)  # fmt: skip
async def test_the_probe_says_what_is_wrong(
    http: httpx.AsyncClient, scripted: ScriptedOpenEnv, kind: str, script: Any, check: str, detail: str
) -> None:
    scripted.scripts[kind] = script
    answer = await register(http, scripted.url)
    assert answer["code"] == "probe_failed", answer
    failed = [each for each in answer["report"] if not each["ok"]]
    assert [each["check"] for each in failed] == [check]
    assert detail in failed[0]["detail"]
    await scripted.until_seen("lost")


@pytest.mark.parametrize(
    ("path", "page", "detail"),
    [
        ("/schema", (b"<html>", 200, {}), "not JSON"),
        ("/schema", ({}, 404, {}), "answered 404"),
        ("/schema", ([], 200, {}), "not with an object"),
        ("/schema", ({"action": 3}, 200, {}), "schema of the action"),
        ("/schema", ({}, 302, {"Location": "http://169.254.169.254/"}), "redirects"),
        ("/metadata", (b"x" * (LIMIT + 1), 200, {}), "larger than"),
    ],
)
async def test_pages_that_cannot_be_used(
    http: httpx.AsyncClient,
    scripted: ScriptedOpenEnv,
    path: str,
    page: tuple[Any, int, dict[str, str]],
    detail: str,
) -> None:
    content, status, headers = page
    scripted.page(path, content, status, **headers)
    answer = await register(http, scripted.url)
    assert answer["code"] == "probe_failed"
    assert detail in answer["detail"]
    assert "open" not in scripted.seen


@pytest.mark.parametrize("status", [302, 403, 503])
async def test_a_handshake_that_is_refused(
    http: httpx.AsyncClient, scripted: ScriptedOpenEnv, status: int
) -> None:
    scripted.refusal = status
    answer = await register(http, scripted.url)
    assert answer["report"][-1]["check"] == "make"
    assert "cannot be opened" in answer["detail"]


async def test_a_full_server_is_no_broken_one(http: httpx.AsyncClient, scripted: ScriptedOpenEnv) -> None:
    registered = await register(http, scripted.url)
    scripted.scripts["open"] = refusing("CAPACITY_REACHED", "2/2")
    full = await http.post("/v1/sessions", json={"env_id": "Scripted"})
    assert (full.status_code, full.json()["code"]) == (503, "at_capacity")
    assert "2/2" in full.json()["detail"]
    del scripted.scripts["open"]
    made = await http.post("/v1/sessions", json={"env_id": "Scripted"})
    assert made.status_code == 201, "it does not rest as one that fails does"
    await http.delete(f"/v1/sessions/{made.json()['session_id']}")
    await unregister(http, registered)


async def test_an_answer_that_is_late_is_never_taken_for_another(
    gateway: ServerProcess, http: httpx.AsyncClient, scripted: ScriptedOpenEnv
) -> None:
    registered = await register(http, scripted.url)
    async with EnvClient(gateway.url, timeout_s=40) as client:
        session = await client.make("Scripted")
        await session.reset(seed=1)
        assert (await session.step("a")).observation == "1"
        lost, opened = scripted.seen.count("lost"), scripted.seen.count("open")
        scripted.scripts["step"] = hang
        with pytest.raises(ProblemError) as caught:
            await session.step("b")
        assert caught.value.code == "step_timeout"
        await scripted.until_seen("lost", lost + 1)
        del scripted.scripts["step"]
        await session.reset(seed=1)
        assert scripted.seen.count("open") == opened + 1, "another socket"
        assert (await session.step("c")).observation == "1"
        await session.close()
    await unregister(http, registered)


async def test_what_was_not_asked_for_is_not_listened_to(
    gateway: ServerProcess, http: httpx.AsyncClient, scripted: ScriptedOpenEnv
) -> None:
    registered = await register(http, scripted.url)
    async with EnvClient(gateway.url, timeout_s=40) as client:
        session = await client.make("Scripted")
        await session.reset(seed=1)
        scripted.scripts["step"] = saying(observation("answer"), observation("more"), observation("and more"))
        assert (await session.step("a")).observation == "answer"
        with pytest.raises(ProblemError) as caught:
            await session.step("b")
        assert (caught.value.code, caught.value.extra["reason"]) == ("session_gone", "lost")
        del scripted.scripts["step"]
        other = await client.make("Scripted")
        await other.reset(seed=1)
        assert (await other.step("a")).observation == "1"
        await other.close()
    await unregister(http, registered)


async def test_bad_answers_cost_no_session(
    gateway: ServerProcess, http: httpx.AsyncClient, scripted: ScriptedOpenEnv
) -> None:
    """Each is the answer to one question, so the socket can be gone on with."""
    registered = await register(http, scripted.url)
    async with EnvClient(gateway.url, timeout_s=40) as client:
        session = await client.make("Scripted")
        await session.reset(seed=1)
        opened = scripted.seen.count("open")
        bad = ["not JSON", "[" * 100_000, "[]", "{}", BAD, observation("on", reward="much")]
        for place, said in enumerate((*bad, observation("on", done=1)), start=1):
            scripted.scripts["step"] = saying(said)
            with pytest.raises(ProblemError) as caught:
                await session.step("a")
            assert caught.value.code == "upstream_error", said
            assert "may have been taken" in caught.value.detail
            del scripted.scripts["step"]
            assert (await session.step("a")).observation == str(2 * place)
        assert scripted.seen.count("open") == opened
        scripted.scripts["reset"] = saying(BAD)
        with pytest.raises(ProblemError, match="upstream_error"):
            await session.reset(seed=1)
        del scripted.scripts["reset"]
        assert (await session.reset(seed=1)).observation == "0"
        assert (await session.step("a")).observation == "1"
        await session.close()
        await scripted.until_seen("lost", scripted.seen.count("open"))
    await unregister(http, registered)


async def test_a_socket_that_breaks_between_episodes_costs_nothing(
    gateway: ServerProcess, http: httpx.AsyncClient, scripted: ScriptedOpenEnv
) -> None:
    registered = await register(http, scripted.url)
    async with EnvClient(gateway.url, timeout_s=40) as client:
        session = await client.make("Scripted")
        scripted.scripts["reset"] = hang_up
        restored = asyncio.create_task(session.reset(seed=1))
        await scripted.until_seen("reset", 3)
        del scripted.scripts["reset"]
        assert (await restored).observation == "0"
        await session.close()
        await scripted.until_seen("lost", scripted.seen.count("open"))
    await unregister(http, registered)


async def test_sessions_that_end_here_end_there(
    gateway: ServerProcess, http: httpx.AsyncClient, scripted: ScriptedOpenEnv
) -> None:
    registered = await register(http, scripted.url)
    made = (await http.post("/v1/sessions", json={"env_id": "Scripted", "count": 3, "reset": {}})).json()
    assert scripted.seen.count("open") == 5
    closed = [each["session_id"] for each in made["sessions"]]
    await http.post("/v1/sessions/close", json={"session_ids": closed})
    await scripted.until_seen("lost", 5)
    assert scripted.seen.count("close") == 5
    # One that is in the middle of a step.
    scripted.scripts["step"] = hang
    session_id = (await http.post("/v1/sessions", json={"env_id": "Scripted", "reset": {}})).json()[
        "session_id"
    ]
    step = asyncio.create_task(http.post(f"/v1/sessions/{session_id}/step", json={"action": "a"}))
    await scripted.until_seen("step", 2)
    await http.delete(f"/v1/sessions/{session_id}")
    await scripted.until_seen("lost", 6)
    assert (await step).json()["code"] == "session_gone"
    await unregister(http, registered)


async def test_an_action_that_is_nested_deeply_is_the_environments_to_judge(
    http: httpx.AsyncClient, scripted: ScriptedOpenEnv
) -> None:
    number = {"type": "object", "properties": {"move": {"type": "integer"}}, "required": ["move"]}
    text = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
    scripted.page("/schema", {"action": number, "observation": text})
    registered = await register(http, scripted.url)
    made = (await http.post("/v1/sessions", json={"env_id": "Scripted", "reset": {"seed": 1}})).json()
    action = "[" * 300 + "]" * 300
    stepped = await http.post(f"/v1/sessions/{made['session_id']}/step", json={"action": action})
    assert stepped.json().get("observation") == "1", stepped.text
    await unregister(http, registered)
