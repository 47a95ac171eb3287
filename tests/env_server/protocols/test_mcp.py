"""The adapter for MCP's clients, met by the real one and by raw requests: a session of theirs is a session of ours."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import httpx2
import pytest
from mcp import Client, MCPError
from mcp.client.streamable_http import streamable_http_client

from rollgym.clients.protocol.errors import ProblemError
from rollgym.clients.replies.formats.table import FORMATS
from rollgym.env_server.protocols.mcp_forms import META, VERSIONS, listed_tools, own_tools, problem_message
from rollgym.envs.tools.tool_use import ToolUseEnv
from tests.support.wire import Server

HEADERS = {"Accept": "application/json, text/event-stream"}


@asynccontextmanager
async def agent(server: Server, path: str, token: str | None = None) -> AsyncIterator[Client]:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    async with httpx2.AsyncClient(headers=headers, timeout=30) as http:
        transport = streamable_http_client(f"{server.url}/mcp/{path}", http_client=http)
        async with Client(transport) as client:
            yield client


async def ours(client: Client, tool: str, **arguments: Any) -> dict[str, Any]:
    """Call a tool; gives the answer of our own protocol that lies beside what the agent is shown."""
    result = await client.call_tool(tool, arguments)
    assert result.meta is not None
    found: dict[str, Any] = result.meta[META]
    return found


async def sessions(server: Server, token: str | None = None) -> list[Any]:
    async with server.http(token) as client:
        found: list[Any] = (await client.get("/v1/sessions")).json()["sessions"]
        return found


def said(result: Any) -> str:
    return "".join(part.text for part in result.content)


# -- with the real client ----------------------------------------------------------------------------------------------


async def test_an_environments_tools_are_tools_and_solve_its_task(plain: Server) -> None:
    kwargs = {"kinds": ["stock"]}
    env = ToolUseEnv(**kwargs)
    question, info = env.reset(seed=5, options={"expert": True})
    async with agent(plain, f"ToolUse-v0?seed=5&kwargs={json.dumps(kwargs)}") as client:
        assert client.instructions is not None
        assert client.instructions.endswith(question)
        # What only those need who write calls as text is left out.
        assert "<tool_call>" in info["instruction"]
        assert "<tool_call>" not in client.instructions
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        declared = {tool["function"]["name"]: tool["function"] for tool in info["tools"]}
        assert tools.keys() == {"reset", "step", *declared}
        for name, function in declared.items():
            assert tools[name].description == function["description"]
            assert tools[name].input_schema == function["parameters"]
        while "<answer>" not in info["expert_action"]:
            (call,) = FORMATS["hermes"].read(info["expert_action"], {}).calls
            *_, info = env.step(info["expert_action"])
            result = await client.call_tool(call.name, dict(call.arguments))
            assert not result.is_error
            # The result itself, without the marks that a format puts around it.
            assert said(result) == info["messages"][0]["content"]
        result = await client.call_tool("step", {"action": info["expert_action"]})
        assert said(result).startswith("The answer is right.")
        assert "The episode has ended" in said(result)
        answer = result.meta[META]
        assert (answer["reward"], answer["terminated"], answer["info"]["success"]) == (1.0, True, True)
    assert await sessions(plain) == [], "a session ends with that of its client"


@pytest.mark.parametrize("call_format", sorted(FORMATS))
async def test_tools_are_called_in_the_format_that_the_environment_reads(
    plain: Server, call_format: str
) -> None:
    path = f"ToolUse-v0?kwargs={json.dumps({'call_format': call_format})}"
    async with agent(plain, path) as client:
        assert said(await client.call_tool("calculator", {"expression": "6 * 7"})) == "42"


@pytest.mark.parametrize("call_format", sorted(FORMATS))
async def test_marks_of_a_format_in_arguments_make_no_other_call(plain: Server, call_format: str) -> None:
    marks = "a</think></tool_call></parameter><parameter=key>b</store_set>"
    path = f"ToolUse-v0?seed=5&kwargs={json.dumps({'call_format': call_format})}"
    async with agent(plain, path) as client:
        result = await client.call_tool("store_set", {"key": "lamps", "value": marks})
        kept = said(await client.call_tool("store_get", {"key": "lamps"}))
    if call_format == "qwen-xml":
        # It has no way to write it, and nothing is called.
        assert result.is_error
        assert "the format qwen-xml has no form for the call" in said(result)
    else:
        assert not result.is_error
        assert kept == marks


async def test_an_episode_is_that_of_our_own_protocol(plain: Server) -> None:
    async with plain.socket() as socket, agent(plain, "Count") as client:
        session = await socket.call("make", env_id="Count", reset={"seed": 4})
        names = [tool.name for tool in (await client.list_tools()).tools]
        assert names == ["reset", "step"]
        began = await ours(client, "reset", seed=4)
        assert began["observation"] == session["reset"]["observation"]
        assert (began["seed"], began["episode"]) == (4, 1), "the first one was begun with the session"
        for text in ("é", "b", "c"):
            step = await socket.call("step", session_id=session["session_id"], action=text)
            seen = await ours(client, "step", action=text)
            for name in ("observation", "reward", "terminated", "truncated", "step"):
                assert seen[name] == step[name]
            assert seen["info"] == step["info"]
        assert seen["terminated"]
        over = await client.call_tool("step", {"action": "d"})
        assert over.is_error
        assert "ended" in said(over)
        assert (await ours(client, "reset"))["episode"] == 2
        await socket.call("close", session_id=session["session_id"])


async def test_actions_that_are_no_text_come_as_they_are_or_as_text(plain: Server) -> None:
    async with agent(plain, "Arrays") as client:
        action = {"push": [0.5, 0.25], "key": 2}
        for form in (action, json.dumps(action)):
            assert (await ours(client, "step", action=form))["reward"] == 0.75
        refused = await client.call_tool("step", {"action": {"push": [0.5]}})
        assert refused.is_error


async def test_what_goes_wrong_is_told_to_the_agent_and_the_session_goes_on(plain: Server) -> None:
    async with agent(plain, "ToolUse-v0?seed=1") as client:
        bad = await client.call_tool("calculator", {"formula": "1"})
        assert bad.is_error
        assert "'expression' is a required property" in said(bad)
        for tool, arguments in (
            ("step", {}),
            ("step", {"action": "a", "more": 1}),
            ("reset", {"seed": -1}),
            ("reset", {"seed": "four"}),
        ):
            assert (await client.call_tool(tool, arguments)).is_error, (tool, arguments)
        with pytest.raises(MCPError, match="there is no tool 'fly'"):
            await client.call_tool("fly", {})
        with pytest.raises(MCPError, match="expert"):
            await client.call_tool("reset", {"options": {"expert": True}})
        for expression, is_error in (("1 / 0", True), ("1", False)):
            called = await client.call_tool("calculator", {"expression": expression})
            assert called.is_error is is_error, said(called)
        assert said(called) == "1"
    async with agent(plain, "Count") as client:
        raised = await client.call_tool("step", {"action": "raise"})
        assert raised.is_error
        assert "secret" not in raised.model_dump_json()
        assert not (await client.call_tool("reset", {})).is_error


async def test_sessions_are_their_tokens_and_have_their_quotas(
    guarded: tuple[Server, dict[str, str]],
) -> None:
    server, tokens = guarded
    async with agent(server, "Count", tokens["alice"]) as client:
        (session,) = await sessions(server, tokens["alice"])
        assert session["env_id"] == "Count"
        async with server.http(tokens["bob"]) as bob:
            answer = await rpc(bob, "Count", "tools/list", session=session["session_id"])
            assert answer.status_code == 404
            # To end what is not one's own does nothing.
            await bob.delete("/mcp/Count", headers={"Mcp-Session-Id": session["session_id"]})
        assert not (await client.call_tool("step", {"action": "a"})).is_error
        async with server.http(tokens["alice"]) as alice:
            full = [await rpc(alice, "Count", "initialize") for _ in range(2)][-1]
            assert full.status_code == 503
            assert int(full.headers["retry-after"]) > 0
            assert full.json()["error"]["data"]["code"] == "at_capacity"
        async with server.http(tokens["node"]) as node:
            assert (await rpc(node, "Count", "initialize")).status_code == 403
        async with server.http() as nobody:
            refused = await rpc(nobody, "Count", "initialize")
            assert (refused.status_code, "www-authenticate" in refused.headers) == (401, True)


# -- raw requests ------------------------------------------------------------------------------------------------------


async def rpc(
    client: httpx.AsyncClient,
    path: str,
    method: str,
    params: Any = None,
    *,
    session: str | None = None,
    version: str | None = None,
) -> httpx.Response:
    headers = dict(HEADERS)
    if session is not None:
        headers["Mcp-Session-Id"] = session
    if version is not None:
        headers["Mcp-Protocol-Version"] = version
    body = {"jsonrpc": "2.0", "id": 1, "method": method, **({} if params is None else {"params": params})}
    return await client.post(f"/mcp/{path}", json=body, headers=headers)


async def begin(client: httpx.AsyncClient, path: str) -> str:
    answer = await rpc(client, path, "initialize", {"protocolVersion": VERSIONS[1]})
    assert answer.json()["result"]["protocolVersion"] == VERSIONS[1]
    return answer.headers["mcp-session-id"]


async def test_requests_reach_the_process_that_owns_the_session(plain: Server) -> None:
    """Every request is a connection of its own, which the kernel gives to either process."""
    owned: dict[str, str] = {}
    async with asyncio.timeout(60):
        while len(owned) < 2:
            async with plain.http() as client:
                session = await begin(client, "ToolUse-v0?seed=3")
                if session.partition(".")[0] in owned:
                    await client.delete("/mcp/ToolUse-v0", headers={"Mcp-Session-Id": session})
                else:
                    owned[session.partition(".")[0]] = session
    for session in owned.values():
        for number in range(6):
            async with plain.http() as client:
                listed = await rpc(client, "ToolUse-v0", "tools/list", session=session)
                assert len(listed.json()["result"]["tools"]) == 11
                call = {"name": "calculator", "arguments": {"expression": f"{number} + 1"}}
                answer = (await rpc(client, "ToolUse-v0", "tools/call", call, session=session)).json()[
                    "result"
                ]
                assert answer["content"] == [{"type": "text", "text": str(number + 1)}]
                # To ask for the tools has not begun an episode anew.
                assert answer["_meta"][META]["step"] == number + 1
        async with plain.http() as client:
            ended = await client.delete("/mcp/ToolUse-v0", headers={"Mcp-Session-Id": session})
            assert ended.status_code == 204
            gone = await rpc(client, "ToolUse-v0", "tools/list", session=session)
            assert gone.status_code == 404


async def test_messages_that_are_none_of_mcps(plain: Server) -> None:
    async with plain.http() as client:
        for content, status, code in (
            (b"{", 400, -32700),
            (b"[]", 400, -32600),
            (b"5", 400, -32600),
            (b'"ping"', 400, -32600),
            (b"null", 400, -32600),
            (b"{}", 400, -32600),
            (b'{"jsonrpc": "1.0", "id": 1, "method": "ping"}', 400, -32600),
            (b'{"jsonrpc": "2.0", "id": null, "method": "ping"}', 400, -32600),
            (b'{"jsonrpc": "2.0", "id": true, "method": "ping"}', 400, -32600),
            (b'{"jsonrpc": "2.0", "id": 1.5, "method": "ping"}', 400, -32600),
            (b'{"jsonrpc": "2.0", "id": [1], "method": "ping"}', 400, -32600),
            (b'{"jsonrpc": "2.0", "id": 1180591620717411303424, "method": "ping"}', 400, -32600),
            (b'[{"jsonrpc": "2.0", "id": 1180591620717411303424, "method": "initialize"}]', 200, -32600),
            (b"[" * 10_000, 400, -32700),
            (b"[" * 10_000 + b"]" * 10_000, 400, -32700),
            (b'{"jsonrpc": "2.0", "id": 1, "method": "ping", "params": []}', 400, -32602),
            (b'{"jsonrpc": "2.0", "id": 1, "method": "resources/list"}', 200, -32601),
            (b'{"jsonrpc": "2.0", "id": 1, "method": "tools/list"}', 400, -32600),
        ):
            headers = {**HEADERS, "Content-Type": "application/json"}
            answer = await client.post("/mcp/Count", content=content, headers=headers)
            said = answer.json()
            (said,) = said if isinstance(said, list) else [said]
            assert (answer.status_code, said["error"]["code"]) == (status, code), content
        for content in (
            b'{"jsonrpc": "2.0", "method": "notifications/initialized"}',
            b'{"jsonrpc": "2.0", "id": 9, "result": {}}',
            b'{"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 1180591620717411303424}}',
        ):
            answer = await client.post(
                "/mcp/Count", content=content, headers={**HEADERS, "Content-Type": "application/json"}
            )
            assert (answer.status_code, answer.content) == (202, b"")
        assert (await rpc(client, "Count", "ping")).json() == {"jsonrpc": "2.0", "id": 1, "result": {}}
        assert (await client.get("/mcp/Count", headers=HEADERS)).status_code == 405
        assert (await client.delete("/mcp/Count")).status_code == 422
        for session in ("bad id!", "0.none", "x" * 200):
            ended = await client.delete("/mcp/Count", headers={"Mcp-Session-Id": session})
            assert (ended.status_code, ended.json()["code"]) == (404, "unknown_session")
        large = await client.post("/mcp/Count", content=b" " * 2_000_000, headers=HEADERS)
        assert large.status_code == 413


async def test_sessions_that_cannot_begin_leave_nothing(plain: Server) -> None:
    async with plain.http() as client:
        for path, status, code in (
            ("Coumt", 404, "unknown_env"),
            ("Count?kwargs={}x", 422, "invalid_request"),
            ("Count?kwargs=[]", 422, "invalid_request"),
            ("Count?seed=-1", 422, "invalid_request"),
            ("Count?seed=9007199254740992", 422, "invalid_request"),
            (f"Count?seed={5000 * '0'}", 422, "invalid_request"),
            ("Count?colour=red", 422, "invalid_request"),
            ('Count?kwargs={"length": 0}', 422, "invalid_kwargs"),
        ):
            answer = await rpc(client, path, "initialize")
            assert (answer.status_code, answer.json()["error"]["data"]["code"]) == (status, code), path
        old = await rpc(client, "Count", "server/discover", version="2026-07-28")
        assert (old.status_code, old.json()["error"]["data"]["supported"]) == (400, list(VERSIONS))
        newest = await rpc(client, "Count", "initialize", {"protocolVersion": "2099-01-01"})
        assert newest.json()["result"]["protocolVersion"] == VERSIONS[0]
        session = newest.headers["mcp-session-id"]
        other = await rpc(client, "SlowCount", "tools/list", session=session)
        assert other.status_code == 404
        assert (await rpc(client, "Count", "tools/list", session="0.none")).status_code == 404
        await client.delete("/mcp/Count", headers={"Mcp-Session-Id": session})
        assert (await client.get("/v1/sessions")).json()["sessions"] == []


async def post(client: httpx.AsyncClient, session: str, message: Any, **headers: str) -> httpx.Response:
    """Send a message to SlowCount on a connection that may go to either process."""
    return await client.post(
        "/mcp/SlowCount", json=message, headers={**HEADERS, "Mcp-Session-Id": session, **headers}
    )


def call_of_step(message_id: Any, action: str) -> dict[str, Any]:
    params = {"name": "step", "arguments": {"action": action}}
    return {"jsonrpc": "2.0", "id": message_id, "method": "tools/call", "params": params}


def cancellation(message_id: Any) -> dict[str, Any]:
    params = {"requestId": message_id, "reason": "the user has other plans"}
    return {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": params}


async def test_a_session_that_has_ended_is_not_found_whatever_is_said_to_it(plain: Server) -> None:
    async with plain.http() as client:
        session = await begin(client, "SlowCount")
        ping = {"jsonrpc": "2.0", "id": 2, "method": "ping"}
        messages = [
            ping,
            {"jsonrpc": "2.0", "method": "notifications/initialized"},
            {"jsonrpc": "2.0", "id": 9, "result": {}},
            cancellation(4),
            [ping],
            call_of_step(3, "a"),
        ]
        assert (await post(client, session, ping)).json()["result"] == {}
        assert (await client.delete("/mcp/SlowCount", headers={"Mcp-Session-Id": session})).status_code == 204
        for message in messages:
            for gone in (session, "bad id!"):
                assert (await post(client, gone, message)).status_code == 404, message
        again = await client.delete("/mcp/SlowCount", headers={"Mcp-Session-Id": session})
        assert again.status_code == 404


async def test_a_call_that_is_cancelled_ends_and_leaves_the_session_usable(anywhere: Server) -> None:
    async with anywhere.http() as client, anywhere.http() as other:
        session = await begin(client, "SlowCount?seed=1")
        for message_id in (5, "5", 0, -1):
            running = asyncio.create_task(post(client, session, call_of_step(message_id, "sleep 15")))
            async with asyncio.timeout(10):
                while not running.done():
                    assert (await post(other, session, cancellation(message_id))).status_code == 202
                    await asyncio.sleep(0.05)
            result = (await running).json()["result"]
            assert result["_meta"][META]["problem"]["cancelled"] is True
            reset = {"name": "reset", "arguments": {"seed": 1}}
            began = await rpc(other, "SlowCount", "tools/call", reset, session=session)
            assert not began.json()["result"]["isError"], began.text
            stepped = await post(client, session, call_of_step(6, "a"))
            assert stepped.json()["result"]["_meta"][META]["observation"] == "1 a"
        assert (await client.delete("/mcp/SlowCount", headers={"Mcp-Session-Id": session})).status_code == 204


async def test_the_cancellation_of_another_call_or_of_none_changes_nothing(anywhere: Server) -> None:
    async with anywhere.http() as client, anywhere.http() as other:
        session = await begin(client, "SlowCount?seed=1")
        assert not (await post(client, session, call_of_step(1, "a"))).json()["result"]["isError"]
        running = asyncio.create_task(post(client, session, call_of_step(2, "sleep 1")))
        while not running.done():
            # One that has ended, one with the text of its number, and ids that there are not.
            for message_id in (1, "2", None, True, 2.5, [2], {}):
                assert (await post(other, session, cancellation(message_id))).status_code == 202
        assert (await running).json()["result"]["_meta"][META]["observation"] == "2 sleep 1"
        bare = {"jsonrpc": "2.0", "method": "notifications/cancelled"}
        for message in (bare, {**bare, "params": []}, {**bare, "params": None}):
            assert (await post(client, session, message)).status_code == 202
        await client.delete("/mcp/SlowCount", headers={"Mcp-Session-Id": session})


async def test_batches_are_answered_under_the_revision_that_has_them(plain: Server) -> None:
    async with plain.http() as client:
        session = await begin(client, "SlowCount?seed=1")
        noted = {"jsonrpc": "2.0", "method": "notifications/initialized"}
        first, second = call_of_step(1, "a"), call_of_step("b", "b")
        begun = {"jsonrpc": "2.0", "id": 3, "method": "initialize", "params": {}}
        for headers in ({}, {"MCP-Protocol-Version": "2025-03-26"}):
            answer = await post(client, session, [first, noted, 5, begun, second], **headers)
            assert answer.status_code == 200
            said = answer.json()
            assert [each["id"] for each in said] == [1, None, 3, "b"]
            assert [each.get("error", {}).get("code") for each in said] == [None, -32600, -32600, None]
            assert not said[0]["result"]["isError"]
            await rpc(client, "SlowCount", "tools/call", {"name": "reset"}, session=session)
        assert (await post(client, session, [noted, noted])).status_code == 202
        newer = {"MCP-Protocol-Version": "2025-11-25"}
        for messages, headers in (([first], newer), ([], {}), ([noted] * 5_000, {}), ([noted] * 101, {})):
            refused = await post(client, session, messages, **headers)
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, -32600)
        await client.delete("/mcp/SlowCount", headers={"Mcp-Session-Id": session})


async def test_openenvs_path_speaks_mcp_to_mcps_clients(plain: Server) -> None:
    """Some clients, such as the Inspector, know no path of a server that does not end in /mcp."""
    async with httpx2.AsyncClient(timeout=30) as http:
        transport = streamable_http_client(f"{plain.url}/openenv/ToolUse-v0/mcp?seed=5", http_client=http)
        async with Client(transport) as client:
            assert {"reset", "step", "calculator"} <= {
                tool.name for tool in (await client.list_tools()).tools
            }
            assert said(await client.call_tool("calculator", {"expression": "6 * 7"})) == "42"
    assert await sessions(plain) == [], "a session ends with that of its client"


# -- forms -------------------------------------------------------------------------------------------------------------


def test_only_what_is_declared_well_is_offered() -> None:
    good = {
        "type": "function",
        "function": {"name": "a", "description": "b", "parameters": {"type": "object"}},
    }
    bare = {"function": {"name": "c"}}
    taken = {"function": {"name": "step"}}
    info = {"tools": [good, bare, taken, {}, {"function": {"name": 5}}, "a", {"function": "a"}]}
    assert own_tools(info) == {
        "a": {"name": "a", "description": "b", "inputSchema": {"type": "object"}},
        "c": {"name": "c", "description": "", "inputSchema": {"type": "object"}},
    }
    assert own_tools({"tools": "none"}) == own_tools({}) == {}
    described = {"action_space": {"type": "Discrete", "n": 3, "start": 1}}
    step = listed_tools({}, described)[1]
    assert step["inputSchema"]["properties"]["action"]["maximum"] == 3


def test_problems_keep_their_codes() -> None:
    message = problem_message(3, ProblemError("invalid_kwargs", "no"))
    assert (message["error"]["code"], message["error"]["data"]["code"]) == (-32602, "invalid_kwargs")


@pytest.mark.parametrize("levels", [300, 1000])
async def test_arguments_that_are_nested_deeply_are_told_to_be(plain: Server, levels: int) -> None:
    deep = b"[" * levels + b"]" * levels
    call = b'{"name": "calculator", "arguments": {"expression": ' + deep + b"}}"
    async with plain.http() as client:
        headers = {**HEADERS, "Mcp-Session-Id": await begin(client, "ToolUse-v0?seed=3")}
        headers["Content-Type"] = "application/json"
        body = b'{"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": ' + call + b"}"
        answer = await client.post("/mcp/ToolUse-v0", content=body, headers=headers)
        assert answer.status_code == 200, answer.text
        assert ("nested too deeply" in answer.text) is (levels > 950), answer.text
        # Others count the sessions of this server.
        assert (await client.delete("/mcp/ToolUse-v0", headers=headers)).status_code == 204


async def test_messages_of_no_form_are_no_results_of_tools() -> None:
    with Server("--env", "Odd=tests.support.served_envs:OddMessages") as server:
        async with server.http() as client:
            session = await begin(client, "Odd?seed=3")
            call = {"name": "step", "arguments": {"action": "a"}}
            answer = await rpc(client, "Odd", "tools/call", call, session=session)
            assert answer.json()["result"]["content"] == [{"type": "text", "text": "1 a"}]
