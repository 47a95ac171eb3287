"""McpTools against real MCP servers: over standard streams, over HTTP, and our own."""

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from rollgym.clients.protocol.tool_calls import ToolCall
from rollgym.clients.replies.formats.hermes import HERMES
from rollgym.envs.core.splits import split_of_text
from rollgym.envs.tools.mcp_tools import McpServer, McpServerError, McpToolsEnv, parse_address
from rollgym.envs.tools.tool import ToolError
from tests.support.processes import ROOT, running
from tests.support.wire import Server

NOTES = ROOT / "examples" / "mcp_notes.py"
STREAMS = {"command": sys.executable, "args": [str(NOTES)]}
READING = {
    "question": "What does the note called shopping say?",
    "answer": "three lamps",
    "setup": [{"name": "add_note", "arguments": {"title": "shopping", "text": "three lamps"}}],
}
WRITING = {
    "question": "Keep a note.",
    "checks": [{"name": "read_note", "arguments": {"title": "meeting"}, "equals": "Tuesday"}],
}


def call(name, **arguments):
    return HERMES.write([ToolCall(name, arguments)])


@pytest.fixture(scope="module")
def notes_url() -> Iterator[str]:
    """The example server, over HTTP."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    with running(subprocess.Popen([sys.executable, str(NOTES), "--port", str(port)])):
        connect = httpx.HTTPTransport(retries=12)
        with httpx.Client(transport=connect, timeout=30) as client:
            client.get(f"http://127.0.0.1:{port}/")
        yield f"http://127.0.0.1:{port}/mcp"


def test_tools_over_standard_streams_and_a_server_for_each_episode():
    env = McpToolsEnv(server=STREAMS, tasks=[READING], tools=["read_note", "list_titles"])
    try:
        observation, info = env.reset(seed=1)
        assert observation == READING["question"]
        assert [tool["function"]["name"] for tool in info["tools"]] == ["read_note", "list_titles"]
        assert info["tools"][0]["function"]["description"] == "Return the text of a note."
        observation, *_, info = env.step(call("read_note", title="shopping"))
        assert info["messages"][0]["content"] == "three lamps"
        assert "there is no note 'x'" in env.step(call("read_note", title="x"))[0]
        # Only the tools that the operator has chosen, and only with arguments that fit.
        assert "there is no tool 'add_note'" in env.step(call("add_note", title="a", text="b"))[0]
        assert "'title' is a required property" in env.step(call("read_note"))[0]
        assert env.step("<answer>Three  lamps.</answer>")[1:3] == (1.0, True)
        env.reset(seed=2)
        # Of what was kept before, the new server knows nothing but the setup.
        assert "shopping" in env.step(call("list_titles"))[0]
        with pytest.raises(ValueError, match="no expert"):
            env.reset(options={"expert": True})
    finally:
        env.close()
    env.close()


def test_tools_over_http_and_checks_of_what_was_done(notes_url):
    env = McpToolsEnv(server={"url": notes_url}, tasks=[WRITING], restart=False, timeout_seconds=20)
    try:
        for text, reward in (("Monday", 0.0), ("Tuesday", 1.0)):
            env.reset(seed=1)
            env.step(call("add_note", title="meeting", text=text))
            assert env.step("It is done.")[4]["action_is_valid"] is False
            _, found, terminated, _, info = env.step("<answer>done</answer>")
            assert (found, terminated, info["success"]) == (reward, True, reward == 1.0)
    finally:
        env.close()


def test_a_tool_that_takes_too_long_is_told_to_the_policy(notes_url):
    server = McpServer(parse_address({"url": notes_url}), 2.0)
    try:
        tools = {tool.name: tool.function for tool in server.tools}
        with pytest.raises(ToolError, match="more than 2 seconds"):
            tools["wait"](seconds=6)
        assert tools["list_titles"]()
    finally:
        server.close()


@pytest.mark.parametrize(
    ("server", "said"),
    [
        ({"command": "/no/such/program"}, "FileNotFoundError"),
        ({"command": sys.executable, "args": ["-c", "pass"]}, "closed"),
        ({"url": "http://127.0.0.1:9/mcp"}, "ConnectError"),
    ],
)
def test_a_server_that_is_not_there_is_an_error_of_the_environment(server, said):
    with pytest.raises(McpServerError, match=said):
        McpToolsEnv(server=server, tasks=[READING])


def test_a_server_that_does_not_answer_is_given_up():
    silent = {"command": sys.executable, "args": ["-c", "import sys; sys.stdin.read()"]}
    with pytest.raises(McpServerError, match="did not answer in 1 seconds"):
        McpServer(parse_address(silent), 1.0)


DYING = """
import os
from mcp.server import MCPServer

server = MCPServer("dying", log_level="ERROR")


@server.tool()
def die() -> str:
    os._exit(1)


server.run()
"""


def test_a_server_that_dies_is_no_fault_of_the_policy():
    env = McpToolsEnv(
        server={"command": sys.executable, "args": ["-c", DYING]}, tasks=[READING | {"setup": []}]
    )
    try:
        env.reset(seed=1)
        with pytest.raises(McpServerError, match=r"has gone|cannot be used"):
            env.step(call("die"))
    finally:
        env.close()


LARGE = """
from mcp.server import MCPServer

server = MCPServer("large", log_level="ERROR")


@server.tool()
def large(size: int) -> str:
    return "a" + "x" * size + "z"


server.run()
"""


def test_of_a_result_that_no_policy_can_read_the_begin_and_the_end_are_shown():
    server = {"command": sys.executable, "args": ["-c", LARGE]}
    env = McpToolsEnv(server=server, tasks=[READING | {"setup": []}])
    try:
        env.reset(seed=1)
        observation, *_, info = env.step(call("large", size=1_000_000))
        content = info["messages"][0]["content"]
        assert content.startswith("ax")
        assert content.endswith("xz")
        assert "[900002 characters are left out]" in content
        # An answer holds it more than once.
        assert len(observation) + len(json.dumps(info)) < 400_000
        assert "x" * 10_000 in env.step(call("large", size=10_000))[0]
    finally:
        env.close()


ODD = """
import asyncio
import json
import sys
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server
from mcp.types import CallToolResult, ListToolsResult, TextContent, Tool


SCHEMA = json.loads(sys.argv[1])


async def call_tool(context, params):
    return CallToolResult(content=[TextContent(type="text", text="done")])


async def list_tools(context, params):
    plain = Tool(name="plain", input_schema={"type": "object"})
    return ListToolsResult(tools=[Tool(name="odd", input_schema=SCHEMA), plain])


async def main():
    server = Server("odd", on_list_tools=list_tools, on_call_tool=call_tool)
    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())


asyncio.run(main())
"""


DONE = {"question": "Do it.", "answer": "done"}


def odd(**schema):
    return {"command": sys.executable, "args": ["-c", ODD, json.dumps({"type": "object", **schema})]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"required": 5}, "5 is not of type 'array'"),
        ({"properties": {"x": {"$ref": "http://127.0.0.1:1/schema"}}}, "nothing is fetched"),
        ({"properties": {"x": {"$ref": "#/properties/x"}}}, "round in circles"),
        ({"properties": {"x": {"pattern": "("}}}, "no regular expression"),
        ({"properties": {"x": {"pattern": r"^\cA$"}}}, "no regular expression"),
    ],
)
def test_a_tool_whose_schema_is_none_is_refused_where_it_is_used(schema, said):
    def env(tools, **task):
        return McpToolsEnv(server=odd(**schema), tasks=[DONE | task], tools=tools)

    with pytest.raises(McpServerError, match="its tool odd are no JSON Schema") as caught:
        env(None)
    assert said in str(caught.value)
    other = env(["plain"], setup=[{"name": "plain"}])
    try:
        other.reset(seed=1)
        assert other.step(call("plain"))[4]["messages"][0]["content"] == "done"
    finally:
        other.close()
    uses = env(["plain"], setup=[{"name": "odd"}])
    try:
        with pytest.raises(McpServerError, match="its tool odd are no JSON Schema"):
            uses.reset(seed=1)
    finally:
        uses.close()


def test_a_task_that_calls_a_tool_that_there_is_not_is_an_error():
    env = McpToolsEnv(server=odd(), tasks=[DONE | {"setup": [{"name": "fly"}]}])
    try:
        with pytest.raises(McpServerError, match="makes no sense: the MCP server has no tool 'fly'"):
            env.reset(seed=1)
    finally:
        env.close()


def test_arguments_that_a_server_s_schema_would_work_on_for_ever_are_told_to_the_policy():
    evil = "(x+x+)+y\\1"
    schema = {
        "properties": {
            "number": {"multipleOf": 0.01},
            "text": {"pattern": evil},
            "names": {"patternProperties": {evil: {}}, "additionalProperties": False},
            "items": {"uniqueItems": True},
            "tree": {"items": {"$ref": "#/properties/tree"}},
        }
    }
    env = McpToolsEnv(server=odd(**schema), tasks=[DONE])
    try:
        env.reset(seed=1)
        tree = 1
        for _ in range(180):
            tree = [tree]
        for refused in ({"text": "x" * 5_000}, {"names": {"x" * 5_000: 1}}, {"tree": tree}):
            observation, *_, info = env.step(call("odd", **refused))
            assert "odd: the arguments cannot be held against its schema" in observation
            assert info["action_is_valid"] is False
        for taken in (
            {"number": 10**400},
            {"items": [{"a": number} for number in range(1_900)]},
            {"tree": [[]]},
        ):
            observation, *_, info = env.step(call("odd", **taken))
            assert info["action_is_valid"], observation
    finally:
        env.close()


def test_the_tools_of_one_of_our_own_servers():
    with Server() as server:
        env = McpToolsEnv(
            server={"url": f"{server.url}/mcp/ToolUse-v0?seed=1"},
            tools=["calculator", "weekday"],
            tasks=[{"question": "Six times seven?", "answer": "42"}],
        )
        try:
            env.reset(seed=1)
            assert env.step(call("calculator", expression="6 * 7"))[4]["messages"][0]["content"] == "42"
            assert "division by zero" in env.step(call("calculator", expression="1 / 0"))[0]
            assert env.step("<answer>42</answer>")[1] == 1.0
        finally:
            env.close()


def test_an_operator_serves_it_and_no_client_chooses_the_server(tmp_path: Path):
    config = tmp_path / "config.yaml"
    text = (ROOT / "examples" / "serving" / "mcp_tools.yaml").read_text()
    config.write_text(text.replace("command: python", f"command: {sys.executable}"))
    with Server("--config", str(config)) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        described = client.get("/v1/envs/McpTools-v0").json()
        assert (described["deterministic"], described["forkable"], described["isolation"]) == (
            False,
            False,
            "process",
        )
        assert not described["kwargs_schema"]["properties"].keys() & McpToolsEnv.operator_kwargs
        for kwargs in (
            {"server": {"command": "touch", "args": ["/srv/hacked"]}},
            {"server": {"url": "http://169.254.169.254/"}},
            {"tasks": [READING]},
            {"tasks_file": "/etc/passwd"},
            {"tools": ["wait"]},
        ):
            refused = client.post("/v1/sessions", json={"env_id": "McpTools-v0", "kwargs": kwargs})
            assert (refused.status_code, refused.json()["code"]) == (422, "invalid_kwargs")
        made = client.post("/v1/sessions", json={"env_id": "McpTools-v0", "reset": {"seed": 3}}).json()
        path = f"/v1/sessions/{made['session_id']}/step"
        if "shopping" in made["reset"]["observation"]:
            actions = ["<answer>three lamps</answer>"]
        else:
            actions = [call("add_note", title="meeting", text="Tuesday at ten"), "<answer>done</answer>"]
        for action in actions:
            answer = client.post(path, json={"action": action}).json()
        assert (answer["reward"], answer["info"]["success"]) == (1.0, True)
        client.delete(f"/v1/sessions/{made['session_id']}")


# -- what the operator writes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("server", "said"),
    [
        ("python", "must be an object"),
        ({}, "either a command or a url"),
        ({"command": "a", "url": "http://b"}, "either a command or a url"),
        ({"command": "a", "headers": {}}, "headers to a url"),
        ({"url": "http://b", "env": {}}, "belong to a command"),
        ({"url": "file:///etc/passwd"}, "begins with http"),
        ({"command": "a", "shell": True}, "no 'shell'"),
        ({"command": "a", "args": [1]}, "are texts"),
    ],
)
def test_addresses_that_make_no_sense(server, said):
    with pytest.raises(ValueError, match=said):
        parse_address(server)


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({}, "set where it is served, by operator_kwargs"),
        ({"server": STREAMS}, "set where it is served"),
        ({"server": STREAMS, "tasks": []}, "no tasks"),
        ({"server": STREAMS, "tasks": ["a"]}, "tasks must be a list of objects"),
        ({"server": STREAMS, "tasks": [{}]}, "with a question"),
        ({"server": STREAMS, "tasks": [{"question": "a"}]}, "an answer or checks"),
        ({"server": STREAMS, "tasks": [{"question": "a", "anwser": "b"}]}, "no 'anwser'"),
        ({"server": STREAMS, "tasks": [READING], "timeout_seconds": 0}, "timeout_seconds"),
    ],
)
def test_configurations_that_make_no_sense(kwargs, said):
    with pytest.raises(ValueError, match=said):
        McpToolsEnv(**kwargs)


def test_tasks_come_from_a_file_and_keep_to_their_split(notes_url, tmp_path):
    file = tmp_path / "tasks.jsonl"
    questions = [f"What is {number}?" for number in range(20)]
    file.write_text("".join(f"{json.dumps({'question': each, 'answer': 1})}\n" for each in questions))
    env = McpToolsEnv(server={"url": notes_url}, tasks_file=str(file), split="valid", restart=False)
    try:
        shown = {env.reset(seed=seed)[0] for seed in range(40)}
    finally:
        env.close()
    assert shown == {each for each in questions if split_of_text(each) == "valid"}
    with pytest.raises(ValueError, match="no tool 'fly'"):
        McpToolsEnv(server={"url": notes_url}, tasks=[READING], tools=["fly"])
