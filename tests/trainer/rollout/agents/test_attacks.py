"""What an agent, a policy or a stranger may send to harm the endpoint: refused before anything is sampled, or done."""

import asyncio
import json
from contextlib import asynccontextmanager

import httpx
import openai
import pytest

from rollgym.trainer.inference.base import SamplingParams
from tests.support.agent_policy import (
    ScriptedPolicy,
    assert_recorded,
    endpoint_of,
    service_of,
    tool_tokenizer,
)
from tests.support.telling_policy import TellingPolicy

TOKENIZER = tool_tokenizer()
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def user(text):
    return {"role": "user", "content": text}


@asynccontextmanager
async def talking(script, policy=ScriptedPolicy, gate=None, **service):
    speaking = policy(TOKENIZER, script, gate=gate)
    async with endpoint_of(service_of(speaking, TOKENIZER, **service)) as endpoint:
        key, session = endpoint.open()
        async with httpx.AsyncClient(base_url=f"{endpoint.url}/s/{key}", timeout=60) as http:
            yield http, session, speaking, endpoint
        assert_recorded(session.trajectory, speaking.log)


def nest(depth, inner="1"):
    return '{"a":' * depth + inner + "}" * depth


BODIES = {
    "tools": lambda deep: (
        '{"messages":[{"role":"user","content":"x"}],"tools":[{"type":"function","function":'
        f'{{"name":"f","parameters":{deep}}}}}]}}'
    ),
    "parts": lambda deep: f'{{"messages":[{{"role":"user","content":[{deep}]}}]}}',
    "arguments": lambda deep: (
        '{"messages":[{"role":"assistant","content":"","tool_calls":[{"id":"a","function":'
        f'{{"name":"f","arguments":{deep}}}}}]}}]}}'
    ),
    "text": lambda deep: (
        '{"messages":[{"role":"assistant","content":"","tool_calls":[{"id":"a","function":'
        f'{{"name":"f","arguments":{json.dumps(deep)}}}}}]}}]}}'
    ),
    "ignored": lambda deep: f'{{"messages":[{{"role":"user","content":"x"}}],"metadata":{deep}}}',
}


@pytest.mark.parametrize("depth", [300, 900, 1100, 100_000])
@pytest.mark.parametrize("where", BODIES)
async def test_a_deep_nest_is_refused_before_anything_is_sampled(where, depth):
    async with talking(lambda prompt: "fine") as (http, session, policy, _):
        for path in ("v1/chat/completions", "mcp", "env/step", "reward"):
            answer = await http.post(path, content=BODIES[where](nest(depth)))
            assert answer.status_code in (200, 400, 404), answer.text
            if path.startswith("v1"):
                asked = len(policy.log.calls)
                assert asked == (answer.status_code == 200)
                assert session.counts.abandoned == 0
        assert (await http.post("v1/chat/completions", json={"messages": [user("x")]})).status_code == 200


@pytest.mark.parametrize(
    "arguments", [nest(300), nest(900), nest(3000), '{"a": 1e400}', f'{{"a": {1 << 80}}}', '{"a":"\\ud800"}']
)
async def test_whatever_the_policy_calls_with_is_handed_over_and_recorded(arguments):
    said = f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>'
    long = SamplingParams(max_new_tokens=50_000)
    async with talking([said, "so"], sampling=long, max_length=10**6) as (http, session, _, _):
        body = {"messages": [user("x")], "tools": [TOOL]}
        answer = await http.post("v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        message = answer.json()["choices"][0]["message"]
        assert message.get("tool_calls") or message["content"] == said
        calls = message.get("tool_calls") or []
        results = [{"role": "tool", "content": "1", "tool_call_id": call["id"]} for call in calls]
        body["messages"] += [message, *(results or [user("y")])]
        assert (await http.post("v1/chat/completions", json=body)).status_code == 200
        assert len(session.trajectory.turns) == 2


@pytest.mark.parametrize("unit", ["a", "é"])
@pytest.mark.parametrize("where", ["content", "tools"])
async def test_a_great_deal_of_one_character_keeps_nobody_waiting(unit, where):
    large = {"messages": [user("x")]}
    if where == "content":
        large["messages"][0]["content"] = unit * 300_000
    else:
        large["tools"] = [{"type": "function", "function": {"name": "f", "description": unit * 300_000}}]
    order = []
    async with talking(lambda prompt: "fine") as (http, _, _, _):

        async def ask(name, body):
            answer = await http.post("v1/chat/completions", json=body)
            order.append(name)
            return answer

        slow = asyncio.create_task(ask("large", large))
        await asyncio.sleep(0.05)
        assert (await ask("small", {"messages": [user("x")]})).status_code == 200
        answer = await slow
        assert answer.status_code in (200, 400)
        if answer.status_code == 400:
            assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert order == ["small", "large"]


@pytest.mark.parametrize(
    "path",
    ["end", "reward", "mcp", "env/step", "v1/responses", "v1/models", "nowhere", "/sessions", "/healthz"],
)
async def test_no_more_of_a_body_is_read_than_is_allowed(path):
    read = 0

    async def endless():
        nonlocal read
        while True:
            read += 1 << 20
            yield b" " * (1 << 20)

    async with talking([]) as (http, session, _, _):
        try:
            answer = await http.post(path, content=endless())
            assert answer.status_code in (404, 405, 413)
        except httpx.HTTPError:
            pass  # the server hung up while more was sent
        assert read < 64 << 20
        assert not session.ended.is_set()


@asynccontextmanager
async def sending(endpoint, target, announced, sent):
    """Send the beginning of a body, and give what comes back."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(endpoint.url.rpartition(":")[2]))
    head = f"POST {target} HTTP/1.1\r\nHost: x\r\nContent-Length: {announced}\r\n\r\n"
    writer.write(head.encode() + b" " * sent)
    async with asyncio.timeout(20):
        yield reader, writer
    writer.close()


@pytest.mark.parametrize("target", ["/s/none/end", "/nowhere"])
async def test_who_announces_a_body_and_does_not_send_it_is_refused_and_hung_up_on(target):
    async with talking([]) as (_, _, _, endpoint), sending(endpoint, target, 100, 10) as (reader, _):
        said = await reader.read()
        assert said.startswith(b"HTTP/1.1 404")
        assert b"connection: close" in said


async def test_a_refusal_leaves_the_connection_to_the_next_request():
    async with talking([]) as (_, _, _, endpoint), sending(endpoint, "/nowhere", 99, 99) as (reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"connection: close" not in head
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"HTTP/1.1 200" in await reader.readuntil(b"ok")


async def test_who_sends_a_little_too_much_reads_why():
    async with talking([]) as (http, _, _, _):
        for _ in range(3):
            answer = await http.post("end", content=b" " * (5 << 20))
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
            assert "connection" not in answer.headers


async def test_any_model_is_the_policy():
    async with talking(["a"]) as (http, _, _, _):
        answer = await http.post("v1/chat/completions", json={"model": "gpt-9", "messages": [user("x")]})
        assert answer.json()["model"] == "policy"


async def test_the_end_of_an_episode_ends_its_streams():
    async with talking(["one two three"], TellingPolicy, asyncio.Event()) as (_, session, policy, endpoint):
        key = next(iter(endpoint.table._open))
        base = f"{endpoint.url}/s/{key}/v1"
        async with (
            asyncio.timeout(20),
            openai.AsyncOpenAI(base_url=base, api_key="x", max_retries=0) as client,
        ):
            stream = await client.chat.completions.create(model="policy", messages=[user("x")], stream=True)
            endpoint.table.remove(key)
            with pytest.raises(openai.APIError, match="has ended"):
                async for _ in stream:
                    pass
        assert policy.cancelled == 1
        assert not session.trajectory.turns


async def test_many_requests_of_one_session_at_one_time_are_all_recorded():
    gate = asyncio.Event()
    async with talking(lambda prompt: "fine", gate=gate) as (http, session, _, _):
        bodies = [{"messages": [user(f"x{number % 3}")], "n": 1 + number % 2} for number in range(60)]
        asking = [asyncio.create_task(http.post("v1/chat/completions", json=body)) for body in bodies]
        while len(session._under_way) < 60:
            await asyncio.sleep(0.005)
        for leaving in asking[::7]:
            leaving.cancel()
        gate.set()
        answers = await asyncio.gather(*asking, return_exceptions=True)
        assert sum(isinstance(answer, httpx.Response) for answer in answers) == 60 - len(asking[::7])
    turns = sum(1 + number % 2 for number in range(60) if number % 7)
    # One whose asker left just when its reply came is recorded, too.
    assert turns <= len(session.trajectory.turns) <= turns + 2 * len(asking[::7])
