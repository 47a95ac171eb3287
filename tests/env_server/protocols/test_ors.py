"""The Open Reward Standard, met by raw requests; `.ci/ors` plays all environments with its own client."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from gymnasium import Space
from hypothesis import given
from hypothesis import strategies as st

from rollgym.clients.protocol.values import encode_value
from rollgym.env_server.access.tokens import add_token
from rollgym.env_server.protocols.ors_forms import TASKS, event, result_events, space_schema
from tests.support.generated_spaces import SPACES
from tests.support.wire import ENVS, INLINE, Server

Events = list[tuple[str, str]]


def read_events(text: str) -> Events:
    """Read a stream as the openreward client does, which cuts white space off each line of data."""
    events: Events = []
    name, data = "", ""
    for line in text.split("\n"):
        if not line:
            if name:
                events.append((name, data))
            name, data = "", ""
        elif not line.startswith(":"):
            field, value = line.split(":", 1)
            if field == "event":
                name = value.lstrip()
            else:
                data = value.lstrip()
    return events


def result_of(events: Events) -> Any:
    """The result that a stream ends with."""
    assert events[0][0] == "task_id"
    assert [name for name, _ in events[1:]] == ["chunk"] * (len(events) - 2) + ["end"], events
    return json.loads("".join(data for _, data in events[1:]))


class Ors:
    """One client, with one session at a time; every request is a connection of its own."""

    def __init__(self, server: Server, env_id: str, **headers: str) -> None:
        self._server = server
        self.headers = {"X-Deployment": env_id, **headers}

    async def ask(self, method: str, path: str, body: Any = None) -> httpx.Response:
        async with httpx.AsyncClient(base_url=self._server.url, timeout=30) as client:
            return await client.request(method, path, json=body, headers=self.headers)

    async def get(self, path: str) -> Any:
        answer = await self.ask("GET", path)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def name_session(self) -> str:
        answer = await self.ask("POST", "/create_session", {})
        assert answer.headers["content-type"].startswith("text/event-stream")
        (_, name), end = read_events(answer.text)
        assert end == ("end", "")
        self.headers["X-Session-ID"] = name
        return name

    async def create(self, **task: Any) -> httpx.Response:
        return await self.ask("POST", "/create", task)

    async def call(self, tool: str, task_id: str | None = None, **given: Any) -> Any:
        body = {"name": tool, "input": given, **({} if task_id is None else {"task_id": task_id})}
        answer = await self.ask("POST", "/call", body)
        assert answer.status_code == 200, answer.text
        return result_of(read_events(answer.text))


@asynccontextmanager
async def ors(server: Server, env_id: str, task: dict[str, Any] | None = None) -> AsyncIterator[Ors]:
    """A session of a task, ended after all."""
    client = Ors(server, env_id)
    name = await client.name_session()
    created = await client.create(**(task or {"split": "train", "index": 4}))
    assert (created.status_code, created.json()) == (200, {"sid": name}), created.text
    try:
        yield client
    finally:
        for path in ("/delete", "/delete_session"):
            assert (await client.ask("POST", path)).json() == {"sid": name}


async def open_sessions(server: Server) -> list[Any]:
    async with server.http() as client:
        found: list[Any] = (await client.get("/v1/sessions")).json()["sessions"]
        return found


# -- what there is -----------------------------------------------------------------------------------------------------


async def test_an_episode_is_that_of_our_own_protocol(anywhere: Server) -> None:
    async with anywhere.socket() as own, ors(anywhere, "Count") as client:
        session = await own.call("make", env_id="Count", reset={"seed": 4})
        assert await client.get("/prompt") == [
            {"text": session["reset"]["observation"], "detail": None, "type": "text"}
        ]
        assert await client.get("/messages") == [
            {"role": "user", "blocks": await client.get("/prompt"), "detail": None}
        ]
        for text in ("é", "b", "c"):
            step = await own.call("step", session_id=session["session_id"], action=text)
            seen = await client.call("step", action=text)
            assert seen == {
                "ok": True,
                "output": {
                    "blocks": [{"text": step["observation"], "detail": None, "type": "text"}],
                    "metadata": {
                        name: step[name] for name in ("terminated", "truncated", "episode", "step", "info")
                    },
                    "reward": 1.0,
                    "finished": step["terminated"],
                },
            }
        over = await client.call("step", action="d")
        assert (over["ok"], over["reason"]) == (False, "episode_finished")
        assert (await client.ask("POST", "/ping")).json() == {"status": "ok"}
        await own.call("close", session_id=session["session_id"])
    assert await open_sessions(anywhere) == []


async def test_tasks_are_seeds_of_splits(plain: Server) -> None:
    client = Ors(plain, "Count")
    assert await client.get("/splits") == [{"name": "train", "type": "train"}]
    assert await client.get("/ToolUse-v0/splits") == [
        {"name": "train", "type": "train"},
        {"name": "valid", "type": "validation"},
        {"name": "test", "type": "test"},
    ]
    for path, body, expected in (
        ("/num_tasks", {"split": "train"}, {"num_tasks": TASKS}),
        ("/task", {"split": "train", "index": 7}, {"task": {"seed": 7, "split": "train"}}),
        ("/task", {"split": "train", "index": -1}, {"task": {"seed": TASKS - 1, "split": "train"}}),
        (
            "/task_range",
            {"split": "train", "start": 2, "stop": 4},
            {"tasks": [{"seed": 2, "split": "train"}, {"seed": 3, "split": "train"}]},
        ),
        ("/task_range", {"split": "train", "start": -1}, {"tasks": [{"seed": TASKS - 1, "split": "train"}]}),
    ):
        answer = await client.ask("POST", path, body)
        named = {} if path == "/num_tasks" else {"env_name": "Count"}
        assert answer.json() == expected | named, answer.text
        assert (await client.ask("POST", f"/Count{path}", body)).json() == answer.json()
    assert len((await client.ask("POST", "/tasks", {"split": "train"})).json()["tasks"]) == TASKS
    for path, body in (
        ("/num_tasks", {"split": "test"}),
        ("/task", {"split": "train", "index": TASKS}),
        ("/task", {"split": "train", "index": True}),
        ("/tasks", {}),
    ):
        assert (await client.ask("POST", path, body)).status_code == 422


async def test_a_split_is_the_environments_own(plain: Server) -> None:
    """The task of a split is what our own protocol gives under the kwarg."""
    prompts = {}
    for split in ("train", "test"):
        async with ors(plain, "ToolUse-v0", {"split": split, "index": 3}) as client:
            ((block,), described) = await client.get("/prompt"), await open_sessions(plain)
            prompts[split] = block["text"]
            async with plain.socket() as own:
                session = await own.call(
                    "make", env_id="ToolUse-v0", kwargs={"split": split}, reset={"seed": 3}
                )
                assert session["reset"]["observation"] in block["text"]
                await own.call("close", session_id=session["session_id"])
            assert [each["seed"] for each in described] == [3]
    assert prompts["train"] != prompts["test"]


async def test_the_environment_is_the_paths_or_the_headers(plain: Server) -> None:
    listed = await Ors(plain, "").get("/list_environments")
    async with plain.http() as client:
        assert listed == [each["env_id"] for each in (await client.get("/v1/envs")).json()["envs"]]
    assert await Ors(plain, "any/Arrays").get("/tools") == await Ors(plain, "").get("/Arrays/tools")
    for client, path in ((Ors(plain, "env"), "/tools"), (Ors(plain, ""), "/Nope/tools")):
        refused = await client.ask("GET", path)
        assert (refused.status_code, refused.json()["code"]) == (404, "unknown_env")
    with Server("--no-builtin", "--env", "One=tests.support.served_envs:Count") as single:
        # OpenReward's clients name a server of one environment as they like.
        assert (await Ors(single, "env").get("/tools"))["tools"][0]["name"] == "step"


async def test_tools_are_the_environments(plain: Server) -> None:
    (acting,) = (await Ors(plain, "Arrays").get("/tools"))["tools"]
    assert acting["name"] == "step"
    assert acting["input_schema"]["properties"]["action"]["properties"] == {
        "key": {"type": "integer", "minimum": 1, "maximum": 3},
        "push": {
            "type": "array",
            "items": {"type": "number", "minimum": -1, "maximum": 1},
            "minItems": 2,
            "maxItems": 2,
        },
    }
    scored = await Ors(plain, "Equal").get("/tools")
    assert [tool["name"] for tool in scored["tools"]] == ["submit"]
    assert scored["terminal_tool"]["arg"] == "response"
    async with ors(plain, "ToolUse-v0") as client:
        shared, of_task = await client.get("/tools"), await client.get("/task_tools")
        assert shared == of_task
        assert len(await open_sessions(plain)) == 1
        names = [tool["name"] for tool in shared["tools"]]
        assert {"calculator", "search", "step"} <= set(names)
        seen = await client.call("calculator", expression="20 + 1")
        assert seen["output"]["blocks"][0]["text"] == "21"
        for tool, given, reason in (
            ("fly", {}, "not_found"),
            ("step", {}, "input_validation"),
            ("step", {"action": "a", "more": 1}, "input_validation"),
        ):
            refused = await client.call(tool, **given)
            assert (refused["ok"], refused["reason"]) == (False, reason)
        # An argument that is wrong is a step: the environment says so.
        assert "expression" in (await client.call("calculator", formula="1"))["output"]["blocks"][0]["text"]


async def test_actions_that_are_no_text_may_come_as_text(plain: Server) -> None:
    async with ors(plain, "Arrays") as client:
        action = {"push": [0.5, 0.25], "key": 2}
        for form in (action, json.dumps(action)):
            assert (await client.call("step", action=form))["output"]["reward"] == 0.75
        refused = await client.call("step", action={"push": [0.5]})
        assert (refused["ok"], refused["reason"]) == (False, "input_validation")


# -- sessions ----------------------------------------------------------------------------------------------------------


async def test_names_cost_nothing_before_a_session_is_created(plain: Server) -> None:
    client = Ors(plain, "Count")
    names = {await client.name_session() for _ in range(50)}
    assert len(names) == 50
    assert await open_sessions(plain) == []
    for method, path in (("POST", "/ping"), ("GET", "/prompt"), ("GET", "/task_tools")):
        refused = await client.ask(method, path)
        assert (refused.status_code, refused.json()["code"]) == (404, "unknown_session")
    del client.headers["X-Session-ID"]
    for path in ("/ping", "/delete", "/create"):
        body = {"split": "train", "index": 0} if path == "/create" else None
        refused = await client.ask("POST", path, body)
        assert (refused.status_code, "X-Session-ID" in refused.json()["detail"]) == (422, True), path


async def test_a_session_is_created_once(plain: Server) -> None:
    client = Ors(plain, "Count")
    await client.name_session()
    task = {"split": "train", "index": 4}
    created = await asyncio.gather(*(client.create(**task) for _ in range(12)))
    assert {answer.status_code for answer in created} == {200}
    assert len(await open_sessions(plain)) == 1
    await client.call("step", action="a")
    assert (await client.create(**task)).status_code == 200
    other = await client.create(split="train", index=5)
    assert (other.status_code, "another task" in other.json()["detail"]) == (422, True)
    assert (await client.call("step", action="b"))["output"]["metadata"]["step"] == 2
    await client.ask("POST", "/delete")
    assert await open_sessions(plain) == []
    assert (await client.ask("POST", "/ping")).status_code == 404
    # The name is free again.
    assert (await client.create(split="train", index=5)).status_code == 200
    await client.ask("POST", "/delete")


async def test_what_cannot_be_created_leaves_nothing(anywhere: Server) -> None:
    client = Ors(anywhere, "Count")
    await client.name_session()
    for task, status in (
        ({}, 422),
        ({"split": "train"}, 422),
        ({"split": "train", "index": 1, "task_spec": {"seed": 1}}, 422),
        ({"split": "train", "index": 1, "toolset_name": "codex"}, 422),
        ({"split": "none", "index": 1}, 422),
        ({"task_spec": {}}, 422),
        ({"task_spec": {"seed": -1}}, 422),
        ({"task_spec": {"seed": True}}, 422),
        ({"task_spec": {"seed": 1, "more": 1}}, 422),
        ({"task_spec": {"seed": 1, "kwargs": {"length": 13}}}, 422),
        ({"task_spec": {"seed": 1, "options": {"raise": True}}}, 500),
        ({"task_spec": {"seed": 1}, "env_name": "Coumt"}, 404),
    ):
        refused = await client.create(**task)
        assert (refused.status_code, bool(refused.json()["detail"])) == (status, True), (task, refused.text)
    refused = await client.create(task_spec={"seed": 1, "options": {"expert": True}})
    assert "gives no expert actions" in refused.json()["detail"]
    assert await open_sessions(anywhere) == []
    assert (await client.create(task_spec={"seed": 1, "kwargs": {"length": 2}})).status_code == 200
    await client.ask("POST", "/delete")


async def test_a_client_that_goes_away_while_creating_can_delete(plain: Server) -> None:
    client = Ors(plain, "SlowCount")
    await client.name_session()
    creating = asyncio.create_task(client.create(task_spec={"seed": 1, "options": {"sleep": 1.0}}))
    async with asyncio.timeout(20):
        while not await open_sessions(plain):
            await asyncio.sleep(0.02)
    creating.cancel()
    assert (await client.ask("POST", "/delete")).status_code == 200
    async with asyncio.timeout(20):
        while await open_sessions(plain):
            await asyncio.sleep(0.02)
    assert (await client.ask("POST", "/ping")).status_code == 404


# -- calls -------------------------------------------------------------------------------------------------------------


async def test_a_call_whose_answer_was_lost_is_made_once(anywhere: Server) -> None:
    """The client goes away in the middle of the stream and asks for its task again, over another connection."""
    async with ors(anywhere, "SlowCount") as client:
        body = {"name": "step", "input": {"action": "sleep 0.5"}}
        async with (
            httpx.AsyncClient(base_url=anywhere.url, timeout=30) as http,
            http.stream("POST", "/call", json=body, headers=client.headers) as stream,
        ):
            lines = stream.aiter_lines()
            assert [await anext(lines), await anext(lines)] == ["event: task_id", "data: 0-0"]
        for _ in range(2):
            seen = await client.call("step", "0-0", action="sleep 0.5")
            assert seen["output"]["metadata"]["step"] == 1
        assert (await client.call("step", action="b"))["output"]["metadata"]["step"] == 2
        other = await client.call("step", "0-0", action="c")
        assert not other["ok"]
        for wrong in ("", "0", "0-", "-1", "a-b", "0-0-0", "9" * 40 + "-1", "²-1"):
            refused = await client.ask("POST", "/call", {**body, "task_id": wrong})
            assert refused.status_code == 422, wrong


async def test_the_last_call_can_be_asked_for_again(plain: Server) -> None:
    async with ors(plain, "Count") as client:
        first = await client.call("step", action="win")
        assert first["output"]["finished"]
        assert await client.call("step", "0-0", action="win") == first


async def test_an_environment_that_fails_is_an_error_and_no_reward(plain: Server) -> None:
    for env_id, action, code in (
        ("Count", "raise", "env_error"),
        ("Count", "nan", "env_error"),
        ("Count", "object", "env_error"),
        ("SlowCount", "exit", "session_gone"),
    ):
        async with ors(plain, env_id, {"task_spec": {"seed": 1}}) as client:
            answer = await client.ask("POST", "/call", {"name": "step", "input": {"action": action}})
            (first, (name, said)) = read_events(answer.text)
            assert first == ("task_id", "0-0")
            assert name == "error"
            assert said.startswith((code, "env_error")), said
            assert "secret" not in said


async def test_a_second_call_beside_a_running_one_is_told_so(plain: Server) -> None:
    async with ors(plain, "SlowCount") as client:
        first, second = await asyncio.gather(
            client.call("step", action="sleep 1"), client.call("step", action="sleep 1.5")
        )
        assert sorted((first["ok"], second["ok"])) == [False, True]
        refused = first if second["ok"] else second
        assert "another call is running" in refused["error"]


async def running_call(plain: Server, client: Ors, action: str) -> asyncio.Task[httpx.Response]:
    """Return a call that the environment is busy with."""
    (session,) = await open_sessions(plain)
    async with plain.http() as http:
        while True:
            body = {"name": "step", "input": {"action": action}}
            calling = asyncio.create_task(client.ask("POST", "/call", body))
            # A step that comes before the call is taken, and has the call refused if it meets it.
            while not calling.done():
                step = await http.post(f"/v1/sessions/{session['session_id']}/step", json={"action": "b"})
                if step.status_code == 409 and step.json()["code"] == "busy":
                    return calling
                await asyncio.sleep(0.02)


async def test_a_session_that_is_deleted_ends_its_call(plain: Server) -> None:
    async with ors(plain, "SlowCount", {"task_spec": {"seed": 1, "kwargs": {"length": 100}}}) as client:
        async with asyncio.timeout(20):
            calling = await running_call(plain, client, "sleep 15")
        await client.ask("POST", "/delete")
        events = read_events((await calling).text)
        assert (events[-1][0], "gone" in events[-1][1]) == ("error", True)


async def test_large_and_nested_bodies_are_answered(plain: Server) -> None:
    async with ors(plain, "Count", {"task_spec": {"seed": 1, "kwargs": {"length": 100}}}) as client:
        long = await client.call("step", action=" " * 10**6)
        assert long["output"]["blocks"][0]["text"] == "1 " + " " * 10**6
        nest = "[" * 10_000 + "]" * 10_000
        for body in (
            f'{{"name": "step", "input": {{"action": {nest}}}}}',
            f'{{"name": "step", "input": {nest}}}',
            "[]",
            '{"name": "step"}',
            '{"name": 5, "input": {}}',
            '{"name": "step", "input": {"action": "a"}, "more": 1}',
        ):
            async with plain.http() as http:
                headers = {**client.headers, "Content-Type": "application/json"}
                refused = await http.post("/call", content=body, headers=headers)
            assert refused.status_code == 422, body[:60]
        assert (await client.call("step", action="b"))["output"]["metadata"]["step"] == 2


async def test_there_is_no_group_scoring(plain: Server) -> None:
    async with ors(plain, "Count") as client:
        refused = await client.ask("POST", "/score_group", {"candidates": []})
        assert (refused.status_code, "score_group" in refused.json()["detail"]) == (404, True)
        assert (await client.get("/tools"))["supports_score_group"] is False


# -- tokens ------------------------------------------------------------------------------------------------------------


async def test_sessions_are_their_tokens_and_have_their_quotas(tmp_path: Path) -> None:
    file = tmp_path / "tokens.yaml"
    tokens = {name: add_token(file, name, ["play"]) for name in ("alice", "bob")}
    tokens["node"] = add_token(file, "node", ["register"])
    with Server("--no-builtin", *ENVS, *INLINE, "--token-file", str(file), "--max-sessions", "2") as server:
        alice = [Ors(server, "Count", **{"X-API-Key": tokens["alice"]}) for _ in range(3)]
        for client in alice:
            await client.name_session()
        answers = [await client.create(split="train", index=1) for client in alice]
        assert [answer.status_code for answer in answers] == [200, 200, 503]
        assert answers[-1].json()["code"] == "at_capacity"
        assert int(answers[-1].headers["retry-after"]) > 0
        # The same name is another session to another token.
        bob = Ors(server, "Count", Authorization=f"Bearer {tokens['bob']}")
        bob.headers["X-Session-ID"] = alice[0].headers["X-Session-ID"]
        assert (await bob.ask("GET", "/prompt")).status_code == 404
        await bob.ask("POST", "/delete")
        assert (await alice[0].ask("POST", "/ping")).status_code == 200
        for headers in ({}, {"X-API-Key": ""}, {"X-API-Key": "wrong"}):
            refused = await Ors(server, "Count", **headers).ask("GET", "/list_environments")
            assert (refused.status_code, refused.json()["code"]) == (401, "unauthorized")
        node = Ors(server, "Count", **{"X-API-Key": tokens["node"]})
        assert (await node.ask("GET", "/tools")).status_code == 403


async def test_a_session_without_pings_is_gone(guarded: tuple[Server, dict[str, str]]) -> None:
    server, tokens = guarded
    client = Ors(server, "Count", **{"X-API-Key": tokens["alice"]})
    await client.name_session()
    assert (await client.create(split="train", index=1)).status_code == 200
    async with asyncio.timeout(30), server.http(tokens["alice"]) as http:
        while (await http.get("/v1/sessions")).json()["sessions"]:
            await asyncio.sleep(0.1)
    gone = await client.ask("POST", "/ping")
    assert (gone.status_code, gone.json()["reason"]) == (410, "evicted")
    assert (await client.create(split="train", index=2)).status_code == 200
    await client.ask("POST", "/delete")


# -- forms -------------------------------------------------------------------------------------------------------------


@given(st.text(st.sampled_from(' \t\u00a0\u2003\u3000"\\\né𝕏a'), max_size=40), st.integers(1, 600))
def test_a_result_arrives_as_it_was_whatever_its_parts_begin_with(text: str, times: int) -> None:
    payload = {"ok": True, "text": text * times}
    content = b"".join([event("task_id", "0-0"), *result_events(payload, 2**30)])
    assert result_of(read_events(content.decode())) == payload


@given(SPACES, st.integers(0, 2**31))
def test_what_a_space_holds_is_what_its_schema_says(space: Space[Any], seed: int) -> None:
    schema = space_schema(space)
    jsonschema.Draft202012Validator.check_schema(schema)
    space.seed(seed)
    jsonschema.validate(
        encode_value(space, space.sample(), binary=False), schema, jsonschema.Draft202012Validator
    )


def test_an_error_is_one_line() -> None:
    assert event("error", "a\nb\r\nc\u2028d") == b"event: error\ndata: a b c d\n\n"
    with pytest.raises(Exception, match="too_large"):
        list(result_events({"text": "x" * 100}, 50))
