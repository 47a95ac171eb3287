"""Anthropic's API by its own library, against the endpoint: what it is given, and what the record has."""

import json
from contextlib import asynccontextmanager

import anthropic
import httpx
import pytest

from tests.support.agent_policy import (
    ScriptedPolicy,
    assert_recorded,
    endpoint_of,
    service_of,
    tool_tokenizer,
)

TOKENIZER = tool_tokenizer()
TOOLS = [
    {
        "name": "add",
        "description": "Adds.",
        "input_schema": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        },
    }
]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


def user(content):
    return {"role": "user", "content": content}


class Talk:
    def __init__(self, endpoint, policy):
        self.policy = policy
        self.key, self.session = endpoint.open()
        self.root, self.url = endpoint.url, f"{endpoint.url}/s/{self.key}"
        self.client = anthropic.AsyncAnthropic(base_url=self.url, api_key="any", max_retries=0)

    async def say(self, messages, **fields):
        return await self.client.messages.create(
            **{"model": "claude", "max_tokens": 256, "messages": messages} | fields
        )


@asynccontextmanager
async def talk(script, **service):
    policy = ScriptedPolicy(TOKENIZER, script)
    async with endpoint_of(service_of(policy, TOKENIZER, **service)) as endpoint:
        one = Talk(endpoint, policy)
        try:
            yield one
        finally:
            await one.client.close()
        assert_recorded(one.session.trajectory, policy.log)


async def test_a_message_and_its_record():
    async with talk(["Hello there"]) as one:
        got = await one.say([user("Hi")], system=[{"type": "text", "text": "Be brief."}])
        ((request, result),) = one.policy.log.calls
    assert [(block.type, block.text) for block in got.content] == [("text", "Hello there")]
    assert (got.stop_reason, got.stop_sequence) == ("end_turn", None)
    assert got.usage.input_tokens == len(request.prompt_ids)
    assert got.usage.output_tokens == len(result.token_ids)
    shown = TOKENIZER.decode(request.prompt_ids)
    assert shown.startswith("<|im_start|>system\nBe brief.")


@pytest.mark.parametrize("streams", [False, True])
async def test_tools_and_their_results_are_one_segment(streams):
    async with talk([f"<think>\nhm\n</think>\n\nAdding.\n{CALL}\n{CALL}", "3 and 3"]) as one:

        async def say(messages):
            if not streams:
                return await one.say(messages, tools=TOOLS)
            async with one.client.messages.stream(
                model="claude", max_tokens=256, messages=messages, tools=TOOLS
            ) as stream:
                parts = [event async for event in stream if event.type == "text"]
                got = await stream.get_final_message()
                assert "".join(part.text for part in parts) == next(
                    block.text for block in got.content if block.type == "text"
                )
                return got

        messages = [user("1 + 2?")]
        got = await say(messages)
        assert [block.type for block in got.content] == ["thinking", "text", "tool_use", "tool_use"]
        assert (got.content[0].thinking, got.content[1].text) == ("hm", "Adding.")
        assert [block.input for block in got.content[2:]] == [{"a": 1, "b": 2}] * 2
        assert got.stop_reason == "tool_use"
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "3"}]}
            for block in got.content[2:]
        ]
        said = [block.model_dump(exclude_none=True) for block in got.content]
        last = await say([*messages, {"role": "assistant", "content": said}, user(results)])
        assert last.content[0].text == "3 and 3"
        assert last.stop_reason == "end_turn"
        assert len(one.session.trajectory.segments) == 1


async def test_what_a_user_says_beside_results_comes_behind_them():
    async with talk(["a", "b"]) as one:
        call = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1}}
        content = [{"type": "text", "text": "go on"}, {"type": "tool_result", "tool_use_id": "toolu_1"}]
        await one.say([user("Hi"), {"role": "assistant", "content": [call]}, user(content)], tools=TOOLS)
        shown = TOKENIZER.decode(one.policy.log.calls[0][0].prompt_ids)
        assert shown.index("<tool_response>") < shown.index("go on")


async def test_one_call_at_a_time_and_none_at_all():
    async with talk([CALL + CALL, CALL]) as one:
        got = await one.say(
            [user("Hi")], tools=TOOLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True}
        )
        assert [block.type for block in got.content] == ["tool_use"]
        got = await one.say([user("Hi")], tools=TOOLS, tool_choice={"type": "none"})
        assert got.content[0].text == CALL
        assert "# Tools" not in TOKENIZER.decode(one.policy.log.calls[1][0].prompt_ids)


@pytest.mark.parametrize("streams", [False, True])
async def test_a_stop_sequence_ends_the_reply_and_is_named(streams):
    async with talk(["one STOP two"]) as one:
        fields = {"stop_sequences": ["two", "STOP"]}
        if streams:
            async with one.client.messages.stream(
                model="m", max_tokens=64, messages=[user("Hi")], **fields
            ) as stream:
                got = await stream.get_final_message()
        else:
            got = await one.say([user("Hi")], **fields)
        assert got.content[0].text == "one "
        assert (got.stop_reason, got.stop_sequence) == ("stop_sequence", "STOP")
        # The record ends with what completed it, as the engine drew it.
        (turn,) = one.session.trajectory.turns
        kept = one.session.trajectory.segments[0].ids[turn.start : turn.end]
        assert TOKENIZER.decode(kept) == "one STOP"
        one.policy.log.calls.clear()
        one.session.trajectory.turns.clear()
        one.session.trajectory.segments.clear()


async def test_a_reply_at_its_longest_says_so():
    async with talk(["one two three four"]) as one:
        got = await one.say([user("Hi")], max_tokens=2)
        assert got.stop_reason == "max_tokens"
        assert got.usage.output_tokens == 2


async def test_an_empty_reply_is_a_message_without_blocks():
    async with talk([""]) as one:
        async with one.client.messages.stream(model="m", max_tokens=64, messages=[user("Hi")]) as stream:
            got = await stream.get_final_message()
        assert (got.content, got.stop_reason) == ([], "end_turn")


async def test_tokens_are_counted_and_nothing_is_sampled():
    async with talk(["Hello"]) as one:
        counted = await one.client.messages.count_tokens(model="m", messages=[user("Hi")], tools=TOOLS)
        assert one.policy.log.calls == []
        got = await one.say([user("Hi")], tools=TOOLS)
        assert counted.input_tokens == got.usage.input_tokens


async def test_wishes_that_are_passed_over_are_named():
    async with talk(["a", "b"]) as one:
        raw = await one.client.messages.with_raw_response.create(
            model="m",
            max_tokens=2000,
            messages=[user("Hi")],
            tools=TOOLS,
            tool_choice={"type": "any"},
            thinking={"type": "enabled", "budget_tokens": 1024},
            extra_body={"temperature": 0.5},
            metadata={"user_id": "me"},
        )
        assert raw.headers["x-rollgym-ignored"] == "temperature, thinking"


async def test_a_session_is_named_by_either_kind_of_key():
    async with talk(["a", "b"]) as one:
        for how in ({"api_key": one.key}, {"auth_token": one.key}):
            async with anthropic.AsyncAnthropic(base_url=one.root, max_retries=0, **how) as client:
                await client.messages.create(model="m", max_tokens=9, messages=[user("Hi")])
        async with anthropic.AsyncAnthropic(base_url=one.root, api_key="nobody", max_retries=0) as client:
            with pytest.raises(anthropic.AuthenticationError, match="the API key is that of no session"):
                await client.messages.create(model="m", max_tokens=9, messages=[user("Hi")])


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
NESTED: dict = {"type": "text"}
for _ in range(200):
    NESTED = {"type": "tool_result", "content": [NESTED]}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"messages": []}, "at least one message"),
        ({"messages": [user(3)]}, "messages[0].content must be text or a list of blocks"),
        ({"messages": [user([3])]}, "messages[0].content must be text or a list of blocks"),
        ({"messages": [user([IMAGE])]}, "blocks of the type 'image' are not supported"),
        (
            {"messages": [user([{"type": "tool_result", "content": [{"type": "tool_result"}]}])]},
            "blocks of the type 'tool_result' are not supported",
        ),
        ({"messages": [user([NESTED])]}, "nested more than 200"),
        ({"messages": [{"role": "wizard", "content": ""}]}, "messages[0].role must be user or assistant"),
        ({"messages": [user("Hi"), {"role": "assistant", "content": "So"}]}, "beginning of a reply"),
        ({"max_tokens": 0}, "max_tokens must be a whole number"),
        ({"max_tokens": None}, "max_tokens: how long the reply may be must be said"),
        ({"max_tokens": True}, "max_tokens must be a whole number"),
        ({"temperature": "hot"}, "temperature must be a number"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "only an agent's own are"),
        ({"tools": [{"input_schema": {}}]}, "tools[0] must be an object with a name"),
        ({"tool_choice": "auto"}, "tool_choice must be an object"),
        ({"stop_sequences": "x"}, "stop_sequences must be a list"),
        ({"stop_sequences": [""]}, "stop_sequences must be a list"),
        ({"stop_sequences": 0}, "stop_sequences must be a list"),
        ({"stop_sequences": False}, "stop_sequences must be a list"),
        ({"system": False}, "system must be text or a list of blocks"),
        ({"system": 0}, "system must be text or a list of blocks"),
        (
            {"output_config": {"format": {"type": "json_schema"}}},
            "output_config.format.schema must be a JSON",
        ),
        ({"output_format": {"type": "xml"}}, "output_format: the type must be"),
    ],
)
async def test_what_cannot_be_done_is_refused_in_the_apis_shape(fields, said):
    async with talk([]) as one:
        body = {"model": "m", "max_tokens": 9, "messages": [user("Hi")]} | fields
        async with httpx.AsyncClient() as http:
            answer = await http.post(f"{one.url}/v1/messages", json=body)
    assert answer.status_code == 400
    told = answer.json()
    assert (told["type"], told["error"]["type"]) == ("error", "invalid_request_error")
    assert said in told["error"]["message"]


async def test_an_ended_session_and_a_broken_body_are_told():
    async with talk([]) as one:
        async with httpx.AsyncClient() as http:
            broken = await http.post(f"{one.url}/v1/messages", content=b"{" * 100_000)
        assert broken.status_code == 400
        assert broken.json()["error"]["type"] == "invalid_request_error"
        one.session.end()
        with pytest.raises(anthropic.APIStatusError) as caught:
            await one.say([user("Hi")])
        assert caught.value.status_code == 410
        assert "has ended" in json.dumps(caught.value.body)


@pytest.mark.parametrize("content", [None, "", []])
async def test_a_conversation_of_which_nothing_is_said_is_refused(content):
    body = {"model": "claude", "max_tokens": 8, "messages": [{"role": "system", "content": content}]}
    async with talk([]) as one, httpx.AsyncClient() as client:
        for path in ("messages", "messages/count_tokens"):
            got = await client.post(f"{one.url}/v1/{path}", json=body)
            assert (got.status_code, got.json()["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize("streams", [False, True])
async def test_the_tool_runner_sends_its_whole_conversation_since_no_thread_is_held(streams):
    @anthropic.beta_async_tool
    async def add(a: int, b: int) -> str:
        """Adds."""
        return str(a + b)

    async with talk([f"<think>\nhm\n</think>\n\nAdding.\n{CALL}", "It is 3"]) as one:
        runner = one.client.beta.messages.tool_runner(
            model="claude",
            max_tokens=256,
            system="Be brief.",
            messages=[user("1 + 2?")],
            tools=[add],
            stream=streams,
        )
        last = await runner.until_done()
        shown = TOKENIZER.decode(one.policy.log.calls[1][0].prompt_ids)
        (segment,) = one.session.trajectory.segments
    assert last.content[0].text == "It is 3"
    assert shown.count("Be brief.") == shown.count("1 + 2?") == shown.count("<tool_response>") == 1
    assert shown.index("1 + 2?") < shown.index("Adding.") < shown.index("<tool_response>\n3")
    assert segment.prefix_break is None


@pytest.mark.parametrize(
    "thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}, 7]
)
async def test_a_thread_is_refused_by_the_code_that_the_library_goes_on_without_one_for(thread):
    body = {"model": "claude", "max_tokens": 8, "messages": [user("Hi")], "thread": thread}
    async with talk([]) as one, httpx.AsyncClient() as client:
        got = await client.post(f"{one.url}/v1/messages", json=body)
    error = got.json()["error"]
    assert (got.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["details"] == {"error_code": "thread_unsupported_request"}
    assert "without thread" in error["message"]
