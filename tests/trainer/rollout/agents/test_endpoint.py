"""The endpoint as the plain `openai` package uses it, on loopback; whatever is said, the record is the engine's own."""

import asyncio
import json

import httpx
import openai
import pytest

from rollgym.trainer.inference.base import SamplingParams
from rollgym.trainer.inference.engine.torch_engine import TorchEngine
from rollgym.trainer.models.tiny import TinyPolicySettings, build_tiny_model
from rollgym.trainer.records.trajectory import PrefixBreak
from rollgym.trainer.rollout.agents.splicing import SplicingRenderer
from rollgym.trainer.rollout.prompts import ChatRenderer
from tests.support.agent_policy import (
    LoggedClient,
    ScriptedPolicy,
    assert_recorded,
    endpoint_of,
    service_of,
    tool_tokenizer,
)
from tests.support.agent_talk import CALL, TOKENIZER, TOOLS, Talk, user
from tests.support.chat_templates import tokenizer_of


async def test_a_completion_and_its_record(talk):
    one = await talk(["Hello there"])
    got = await one.say([user("Hi")], logprobs=True, extra_body={"return_token_ids": True})
    ((request, result),) = one.policy.log.calls
    assert got.choices[0].message.content == "Hello there"
    assert got.choices[0].finish_reason == "stop"
    assert got.choices[0].token_ids == result.token_ids
    assert got.prompt_token_ids == request.prompt_ids
    assert [each.logprob for each in got.choices[0].logprobs.content] == result.logprobs
    assert "".join(each.token for each in got.choices[0].logprobs.content) == "Hello there<|im_end|>"
    assert (got.usage.prompt_tokens, got.usage.completion_tokens) == (
        len(request.prompt_ids),
        len(result.token_ids),
    )
    assert_recorded(one.trajectory, one.policy.log)
    (turn,) = one.trajectory.turns
    assert (turn.observation, turn.reply, turn.finish_reason) == ("Hi", "Hello there", "stop")


async def test_tools_their_results_and_streams_are_one_segment(talk):
    one = await talk([f"Adding.\n{CALL}\n{CALL}", "3 and 3"])
    messages = [user("1 + 2?")]
    got = await one.say(messages, tools=TOOLS)
    message = got.choices[0].message
    assert got.choices[0].finish_reason == "tool_calls"
    assert message.content == "Adding."
    assert [json.loads(each.function.arguments) for each in message.tool_calls] == [{"a": 1, "b": 2}] * 2
    assert len({each.id for each in message.tool_calls}) == 2
    messages += [message.model_dump(exclude_none=True)]
    messages += [{"role": "tool", "content": "3", "tool_call_id": each.id} for each in message.tool_calls]
    stream = await one.say(messages, tools=TOOLS, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    assert "".join(each.choices[0].delta.content or "" for each in chunks if each.choices) == "3 and 3"
    assert chunks[-1].usage.completion_tokens == len(one.policy.log.calls[1][1].token_ids)
    assert [each.choices[0].finish_reason for each in chunks if each.choices][-1] == "stop"
    assert_recorded(one.trajectory, one.policy.log)
    assert len(one.trajectory.segments) == 1


async def test_streamed_tool_calls_add_up(talk):
    one = await talk([CALL + CALL])
    async with one.openai.chat.completions.stream(
        model="policy", messages=[user("1 + 2?")], tools=TOOLS
    ) as stream:
        async for _ in stream:
            pass
        got = await stream.get_final_completion()
    assert [json.loads(each.function.arguments) for each in got.choices[0].message.tool_calls] == [
        {"a": 1, "b": 2}
    ] * 2
    assert got.choices[0].finish_reason == "tool_calls"


async def test_one_call_at_a_time_where_that_is_asked_for(talk):
    one = await talk([CALL + CALL, "done"])
    got = await one.say([user("1 + 2?")], tools=TOOLS, parallel_tool_calls=False)
    message = got.choices[0].message.model_dump(exclude_none=True)
    assert len(message["tool_calls"]) == 1
    result = {"role": "tool", "content": "3", "tool_call_id": message["tool_calls"][0]["id"]}
    await one.say([user("1 + 2?"), message, result], tools=TOOLS)
    assert len(one.trajectory.segments) == 1
    assert_recorded(one.trajectory, one.policy.log)


async def test_tool_choice_none_offers_no_tools(talk):
    one = await talk([CALL])
    got = await one.say([user("1 + 2?")], tools=TOOLS, tool_choice="none")
    assert got.choices[0].message.content == CALL
    assert "# Tools" not in TOKENIZER.decode(one.policy.log.calls[0][0].prompt_ids)


async def test_several_choices_are_prefix_breaks(talk):
    one = await talk(["a", "b", "c", "next"])
    got = await one.say([user("Hi")], n=3)
    assert [each.message.content for each in got.choices] == ["a", "b", "c"]
    assert len({request.seed for request, _ in one.policy.log.calls}) == 3
    assert_recorded(one.trajectory, one.policy.log)
    assert [segment.prefix_break for segment in one.trajectory.segments][1:] == [
        PrefixBreak.PARALLEL,
        PrefixBreak.PARALLEL,
    ]
    await one.say([user("Hi"), {"role": "assistant", "content": "b"}, user("go on")])
    assert len(one.trajectory.segments) == 3, "the second choice went on"
    assert_recorded(one.trajectory, one.policy.log)


async def test_thinking_is_apart_and_comes_back(talk):
    one = await talk(["<think>\nhm\n</think>\n\nYes", "Sure"])
    got = await one.say([user("Hi")])
    message = got.choices[0].message
    assert (message.content, message.reasoning_content) == ("Yes", "hm")
    await one.say([user("Hi"), {"role": "assistant", "content": "Yes"}, user("sure?")])
    assert len(one.trajectory.segments) == 1
    assert_recorded(one.trajectory, one.policy.log)


async def test_edited_histories_retries_and_sub_agents_are_segments_with_parents(talk):
    one = await talk(["first", "second", "again", "sub", "short"])
    messages = [{"role": "system", "content": "Be brief."}, user("Hi")]
    await one.say(messages)
    messages += [{"role": "assistant", "content": "first"}, user("more")]
    await one.say(messages)
    await one.say(messages)  # a retry
    await one.say([user("a sub-agent's own task")])
    await one.say(
        [messages[0], user("summary: first, second"), {"role": "assistant", "content": "second"}, user("x")]
    )
    assert [segment.prefix_break for segment in one.trajectory.segments] == [
        None,
        PrefixBreak.RETRY,
        PrefixBreak.CONVERSATION,
        PrefixBreak.CONVERSATION,
    ]
    assert one.trajectory.segments[1].parent[0] == 0
    assert one.trajectory.prefix_breaks == 3
    assert_recorded(one.trajectory, one.policy.log)
    compacted = one.trajectory.segments[3].ids
    second = one.policy.log.calls[1][1].token_ids
    assert any(compacted[at : at + len(second)] == second for at in range(len(compacted))), "as sampled"


async def test_parallel_calls_are_segments_of_their_own(talk):
    gate = asyncio.Event()
    one = await talk(["a", "b", "c"], gate=gate)
    calls = [asyncio.create_task(one.say([user("Hi")])) for _ in range(3)]
    while len(one.session._under_way) < 3:
        await asyncio.sleep(0.005)
    gate.set()
    await asyncio.gather(*calls)
    assert len(one.trajectory.segments) == 3
    assert_recorded(one.trajectory, one.policy.log)


# -- sampling ----------------------------------------------------------------------------------------------------------


async def test_the_runs_sampling_stands_and_the_agent_is_told(talk):
    one = await talk(["a", "b"])
    raw = await one.openai.chat.completions.with_raw_response.create(
        model="policy", messages=[user("Hi")], temperature=0.2, top_p=0.5, seed=1, presence_penalty=1.0
    )
    assert raw.headers["x-rollgym-ignored"] == "temperature, top_p, presence_penalty, seed"
    assert one.policy.log.calls[0][0].sampling == one.session.service.sampling
    raw = await one.openai.chat.completions.with_raw_response.create(
        model="policy", messages=[user("Hi")], temperature=1.0, top_p=1.0
    )
    assert "x-rollgym-ignored" not in raw.headers


async def test_sampling_can_be_refused_or_left_to_the_agent(talk):
    strict = await talk(["a"], wishes="refuse")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        await strict.say([user("Hi")], temperature=0.2)
    free = await talk(["a"], wishes="agent")
    await free.say([user("Hi")], temperature=0.2, top_p=0.5, seed=4, extra_body={"top_k": 5})
    sampling = free.policy.log.calls[0][0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.2, 0.5, 5)
    with pytest.raises(openai.BadRequestError, match="logit_bias"):
        await free.say([user("Hi")], logit_bias={"5": 1})


async def test_a_shorter_reply_may_be_asked_for_and_a_longer_one_is_the_runs(talk):
    sampling = SamplingParams(max_new_tokens=6)
    one = await talk(
        ["one two three four five six seven", "one two three four five six seven"], sampling=sampling
    )
    got = await one.say([user("Hi")], max_tokens=3)
    assert got.choices[0].finish_reason == "length"
    assert got.usage.completion_tokens == 3
    got = await one.say([user("Hi")], max_completion_tokens=4000)
    assert got.usage.completion_tokens == 6
    assert_recorded(one.trajectory, one.policy.log)


async def test_stop_texts_end_the_reply_and_its_record(talk):
    one = await talk(["one two STOP three four", "fine"])
    got = await one.say([user("Hi")], stop=["STOP"])
    assert got.choices[0].message.content == "one two "
    assert got.choices[0].finish_reason == "stop"
    _, result = one.policy.log.calls[0]
    (turn,) = one.trajectory.turns
    kept = one.trajectory.segments[0].ids[turn.start : turn.end]
    assert kept == result.token_ids[: len(kept)]
    assert TOKENIZER.decode(kept) == "one two STOP"
    await one.say([user("Hi"), {"role": "assistant", "content": "one two "}, user("go on")])
    assert len(one.trajectory.segments) == 1
    assert "three" not in TOKENIZER.decode(one.trajectory.segments[0].ids)


async def test_a_prompt_without_room_is_refused_by_the_name_that_libraries_know(talk):
    one = await talk(["a"], max_length=600)
    with pytest.raises(openai.BadRequestError) as caught:
        await one.say([user("word " * 500)])
    assert caught.value.code == "context_length_exceeded"
    assert one.session.counts.overflows == 1


async def test_large_conversations_are_rendered_all_the_same(talk):
    one = await talk(["a", "b"], max_length=1_000_000)
    messages = [user("word " * 30_000)]
    await one.say(messages)
    await one.say([*messages, {"role": "assistant", "content": "a"}, user("more")])
    assert len(one.trajectory.segments) == 1
    assert_recorded(one.trajectory, one.policy.log)


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [3]}, "messages[0]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content",
        ),
        ({"messages": [{"role": "user", "content": [7]}]}, "messages[0].content"),
        ({"n": 0}, "n"),
        ({"n": 9}, "n"),
        ({"n": True}, "n"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": 3}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"tools": {"a": 1}}, "tools"),
        ({"tools": [{"type": "code_interpreter"}]}, "tools[0]"),
        ({"tool_choice": 5}, "tool_choice"),
        ({"functions": []}, "functions"),
        ({"stop": False}, "stop"),
        ({"response_format": {"type": "grammar"}}, "response_format"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": True}, "top_logprobs"),
        ({"modalities": ["audio"]}, "modalities"),
    ],
)
async def test_what_cannot_be_done_is_refused_by_name(talk, fields, param):
    one = await talk([])
    body = {"model": "policy", "messages": [user("Hi")], **fields}
    async with httpx.AsyncClient() as http:
        answer = await http.post(f"{one.url}/v1/chat/completions", json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert set(error) == {"message", "type", "param", "code"}
    assert one.session.counts.refused == 1
    assert not one.trajectory.segments


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"messages": NaN}', b"[" * 20_000, b"\xff"])
async def test_bodies_that_are_no_request_are_refused(talk, content):
    one = await talk([])
    async with httpx.AsyncClient() as http:
        for path in ("chat/completions", "responses"):
            answer = await http.post(f"{one.url}/v1/{path}", content=content)
            assert answer.status_code == 400


async def test_a_body_beyond_the_limit_is_refused(talk):
    one = await talk([])
    async with httpx.AsyncClient() as http:
        answer = await http.post(f"{one.url}/v1/chat/completions", content=b" " * (1 << 22) + b"{}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")


async def test_keys_that_are_unknown_or_ended_are_told_apart(talk):
    one = await talk(["a"])
    by_key = openai.AsyncOpenAI(base_url=f"{one.endpoint.url}/v1", api_key=one.key, max_retries=0)
    got = await by_key.chat.completions.create(model="policy", messages=[user("Hi")])
    assert got.choices[0].message.content == "a"
    assert [model.id async for model in by_key.models.list()] == ["policy"]
    with pytest.raises(openai.AuthenticationError):
        await by_key.with_options(api_key="wrong").models.list()
    stranger = openai.AsyncOpenAI(base_url=f"{one.endpoint.url}/s/wrong/v1", api_key="x", max_retries=0)
    with pytest.raises(openai.NotFoundError):
        await stranger.models.list()
    one.endpoint.table.remove(one.key)
    with pytest.raises(openai.APIStatusError) as caught:
        await one.say([user("Hi")])
    assert (caught.value.status_code, caught.value.code) == (410, "session_ended")
    for client in (by_key, stranger):
        await client.close()


async def test_web_pages_are_refused(talk):
    one = await talk([])
    async with httpx.AsyncClient(headers={"origin": "http://127.0.0.1"}) as http:
        answer = await http.post(f"{one.url}/v1/chat/completions", content=b"{}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "origin_refused")


async def test_turns_are_counted(talk):
    one = await talk(["a", "b"], session={"max_calls": 1})
    await one.say([user("Hi")])
    with pytest.raises(openai.PermissionDeniedError) as caught:
        await one.say([user("Hi")])
    assert caught.value.code == "max_turns_reached"


async def test_who_leaves_takes_the_request_along(talk):
    gate = asyncio.Event()
    one = await talk(["never", "later"], gate=gate)
    waiting = asyncio.create_task(one.say([user("Hi")]))
    await one.policy.asked.wait()
    waiting.cancel()
    async with asyncio.timeout(10):
        while one.session.counts.abandoned == 0:
            await asyncio.sleep(0.005)
    assert one.policy.cancelled == 1
    gate.set()
    await one.say([user("Hi")])
    assert len(one.trajectory.segments) == 1
    assert_recorded(one.trajectory, one.policy.log)


async def test_the_end_of_an_episode_answers_who_still_waits(talk):
    gate = asyncio.Event()
    one = await talk(["never"], gate=gate)
    waiting = asyncio.create_task(one.say([user("Hi")]))
    await one.policy.asked.wait()
    one.endpoint.table.remove(one.key)
    with pytest.raises(openai.APIStatusError) as caught:
        await waiting
    assert caught.value.code == "session_ended"
    assert not one.trajectory.turns


async def test_a_reader_that_stalls_stalls_nobody(talk):
    one = await talk(
        lambda prompt: "word " * 50_000, sampling=SamplingParams(max_new_tokens=90_000), max_length=10**6
    )
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", int(one.endpoint.url.rpartition(":")[2]), limit=1024
    )
    body = json.dumps({"messages": [user("Hi")], "stream": True, "logprobs": True}).encode()
    head = f"POST /s/{one.key}/v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    assert await reader.readexactly(12) == b"HTTP/1.1 200"
    async with asyncio.timeout(20):
        async with httpx.AsyncClient() as http:
            assert (await http.get(f"{one.url}/v1/models")).status_code == 200
    writer.close()


async def test_an_engine_that_fails_is_told_to_agent_and_run(talk):
    def broken(prompt):
        raise RuntimeError("out of memory")

    one = await talk(broken)
    with pytest.raises(openai.InternalServerError):
        await one.say([user("Hi")])
    assert str(one.session.model_failure) == "out of memory"
    assert not one.trajectory.turns


async def test_a_token_that_the_model_does_not_know_is_the_agents_fault():
    tokenizer = tool_tokenizer()
    policy = ScriptedPolicy(tokenizer, ["Hello", "Hello again"])
    known = len(tokenizer)
    tokenizer.add_tokens(["<|added|>"])
    renderer = SplicingRenderer(ChatRenderer(tokenizer, vocabulary=known))
    async with endpoint_of(service_of(policy, tokenizer, renderer=renderer)) as endpoint:
        one = Talk(endpoint, policy)
        with pytest.raises(openai.BadRequestError, match=r"a text holds <\|added\|>, id"):
            await one.say([user("<|added|>")])
        assert (await one.say([user("Hi")])).choices[0].message.content == "Hello", "the episode goes on"
        await one.openai.close()
    assert len(one.trajectory.turns) == 1
    assert one.session.model_failure is None


# -- rewards -----------------------------------------------------------------------------------------------------------


async def test_rewards_are_posted_for_the_episode_and_for_calls(talk):
    one = await talk(["a", "b"])
    raw = await one.openai.chat.completions.with_raw_response.create(model="policy", messages=[user("Hi")])
    assert raw.headers["x-rollgym-call"] == "0"
    async with httpx.AsyncClient(base_url=one.url) as http:
        assert (await http.post("/s", content=b"")).status_code == 404
        assert (await http.post("reward", json={"reward": 0.5, "success": True})).status_code == 200
        assert (await http.post("reward", json={"reward": 1, "call": 0})).status_code == 200
        assert (await http.post("reward", json={"reward": 1, "call": 5})).status_code == 404
        assert (one.session.posted.reward, one.session.posted.turns) == (0.5, {0: 1.0})
        for wrong in (
            b'{"reward": NaN}',
            b'{"reward": 1e400}',
            b'{"reward": 1' + b"0" * 400 + b"}",
            b'{"reward": true}',
            b'{"reward": "1"}',
            b"{}",
        ):
            answer = await http.post("reward", content=wrong)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_number")
        assert one.session.posted.faults == {None}
        assert (await http.post("reward", content=b'{"reward": NaN, "call": 0}')).status_code == 400
        assert (await http.post("reward", json={"reward": 2.0})).status_code == 200
        assert one.session.posted.faults == {0}, "a good reward of the episode says nothing of its calls"
        assert (await http.post("reward", json={"reward": 2.0, "call": 0})).status_code == 200
        assert not one.session.posted.faults
        assert (await http.post("end", json={"reward": 3.0})).status_code == 200
        assert (await http.post("end")).status_code == 410 or one.session.ended.is_set()
    assert one.session.posted.reward == 3.0


async def test_a_real_engine_is_recorded_as_it_answered():
    tokenizer = tokenizer_of("qwen2.5")
    shape = TinyPolicySettings(len(tokenizer), hidden_size=16, layers=1, heads=2, max_length=2048)
    engine = TorchEngine(build_tiny_model(shape, 0), max_rows=8, max_length=2048)
    async with engine:
        client = LoggedClient(engine)
        service = service_of(client, tokenizer, max_length=2048, sampling=SamplingParams(max_new_tokens=12))
        async with endpoint_of(service) as endpoint:
            key, session = endpoint.open()
            agent = openai.AsyncOpenAI(base_url=f"{endpoint.url}/s/{key}/v1", api_key="x", max_retries=0)
            messages = [user("Hi")]
            for number in range(4):
                got = await agent.chat.completions.create(model="policy", messages=messages)
                messages += [
                    {"role": "assistant", "content": got.choices[0].message.content},
                    user(f"turn {number}"),
                ]
            await asyncio.gather(
                *(agent.chat.completions.create(model="policy", messages=messages[:1]) for _ in range(3))
            )
            await agent.close()
    assert_recorded(session.trajectory, client.log)
    assert len(session.trajectory.segments[0].ids) > 60
    assert len(session.trajectory.turns) == 7
