"""Replies handed over while they are sampled: it adds up to the reply, and nothing has to be taken back."""

import asyncio
import json
import time

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollgym.clients.replies.formats.table import FORMATS
from rollgym.trainer.inference.base import GenerationRequest, GenerationResult, SamplingParams
from rollgym.trainer.inference.engine.torch_engine import TorchEngine
from rollgym.trainer.models.tiny import TinyPolicySettings, build_tiny_model
from rollgym.trainer.rollout.agents.answers import Completion
from rollgym.trainer.rollout.agents.calls import AgentCall
from rollgym.trainer.rollout.agents.chat_completions import ChatChunks
from rollgym.trainer.rollout.agents.replies import ParsedReply, read_reply
from rollgym.trainer.rollout.agents.streaming import Delta, ReplyStream, TextStream, stopped
from rollgym.trainer.rollout.prompts import ChatRenderer
from tests.support.agent_policy import (
    assert_recorded,
    endpoint_of,
    service_of,
    tool_tokenizer,
)
from tests.support.chat_templates import tokenizer_of
from tests.support.telling_policy import TellingPolicy

TEMPLATE_FORMATS = FORMATS.of_templates()

TOKENIZER = tool_tokenizer()
RENDERER = ChatRenderer(TOKENIZER)
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
PIECES = [
    *(
        "<think>",
        "</think>",
        "<think>\n",
        "\n</think>\n\n",
        "\n",
        " ",
        "  \n",
        "hello",
        "Yes.",
        "é",
        "🙂",
        "<",
        "</",
        "<tool",
    ),
    *(
        CALL,
        "<tool_call>",
        "{",
        "[",
        "[{",
        "[TOOL_CALLS]",
        '[{"name": "f"}]',
        "<|python_tag|>",
        "{}",
        "STOP",
        "ST",
        "OP",
    ),
]


def streamed(ids, tool_format, stops, begun, cuts):
    """Hand tokens over in parts; return what came of it."""
    stream = ReplyStream(RENDERER.text, RENDERER.special_ids, stops, tool_format, begun=begun)
    given, place = [], 0
    for cut in [*cuts, len(ids)]:
        given += stream.add(ids[place:cut])
        place = max(place, cut)
    result = GenerationResult(list(ids), [-1.0] * len(ids), [0] * len(ids))
    _, plain, _ = stopped(result, stops, RENDERER.text, RENDERER.marked_text)
    reply = read_reply(plain, tool_format, begun=begun)
    early = "".join(each.text for each in given)
    given += stream.end(reply)
    return given, reply, early


@given(
    pieces=st.lists(st.sampled_from(PIECES), max_size=8),
    tool_format=st.sampled_from([None, *TEMPLATE_FORMATS]),
    stops=st.sampled_from([(), ("STOP",), ("STOP", "T"), ("\n", "hello Y")]),
    begun=st.booleans(),
    step=st.integers(1, 5),
)
def test_what_is_handed_over_adds_up_to_the_reply(pieces, tool_format, stops, begun, step):
    ids = [each for piece in pieces for each in TOKENIZER.encode(piece, add_special_tokens=False)]
    given, reply, _ = streamed(ids, tool_format, stops, begun, range(step, len(ids), step))
    assert "".join(each.text for each in given if each.kind == "content") == reply.content
    thought = [each.text for each in given if each.kind == "reasoning"]
    assert ("".join(thought) if thought else None) == reply.reasoning
    kinds = [each.kind for each in given]
    assert kinds == sorted(kinds, reverse=True), "what is thought comes before what is said"


def test_words_are_handed_over_as_they_come():
    ids = TOKENIZER.encode("<think>\none two\n</think>\n\nthree four", add_special_tokens=False)
    _, reply, early = streamed(ids, "hermes", (), False, range(1, len(ids)))
    assert (reply.reasoning, reply.content) == ("one two", "three four")
    assert early == "one twothree four"


def test_no_character_is_broken():
    text = "né 🙂🙃 漢字 👩‍👩‍👧"
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert len(ids) > len(text), "characters of several tokens"
    stream = TextStream(RENDERER.text)
    parts = [stream.add([each]) for each in ids]
    assert "".join(parts) == text
    assert not any("\ufffd" in part for part in parts)


def test_what_may_be_a_call_waits_for_the_end():
    ids = TOKENIZER.encode(f"I add.\n{CALL}", add_special_tokens=False)
    given, reply, early = streamed(ids, "hermes", (), False, range(1, len(ids)))
    assert early == "I add."
    assert reply == ParsedReply("I add.", None, reply.calls)
    assert len(reply.calls) == 1
    assert [each.text for each in given if not each.text] == []


@pytest.mark.parametrize("unit", ["\n", " ", "<", "<tool_call", "é"[:1], "\ufffd", "</think"])
def test_a_reply_of_one_thing_costs_time_in_proportion(unit):
    def seconds(count):
        ids = TOKENIZER.encode(unit, add_special_tokens=False)[:1] * count
        stream = ReplyStream(RENDERER.text, RENDERER.special_ids, ("STOP",), "hermes", begun=False)
        begin = time.process_time()
        for each in ids:
            stream.add([each])
        return time.process_time() - begin

    seconds(100)
    small, large = seconds(1_000), seconds(8_000)
    assert large < 0.1 or large < 24 * small


@pytest.fixture
async def talk():
    opened = []

    async def make(script, gate=None, policy=TellingPolicy, **service):
        speaking = policy(TOKENIZER, script, gate=gate)
        context = endpoint_of(service_of(speaking, TOKENIZER, **service))
        endpoint = await context.__aenter__()
        key, session = endpoint.open()
        client = openai.AsyncOpenAI(base_url=f"{endpoint.url}/s/{key}/v1", api_key="x", max_retries=0)
        opened.append((context, client, session, speaking))
        return client, session, speaking

    yield make
    for context, client, session, speaking in opened:
        await client.close()
        await context.__aexit__(None, None, None)
        assert_recorded(session.trajectory, speaking.log)


HI = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


async def test_a_completion_comes_word_by_word(talk):
    gate = asyncio.Event()
    client, session, _ = await talk([f"<think>\nhm\n</think>\n\nI add one and two.\n{CALL}", "so"], gate=gate)
    async with asyncio.timeout(20):
        stream = await client.chat.completions.create(
            model="policy", messages=HI, tools=[TOOL], stream=True, stream_options={"include_usage": True}
        )
        chunks, said = [], ""
        async for chunk in stream:
            chunks.append(chunk)
            said += (chunk.choices[0].delta.content or "") if chunk.choices else ""
            if said.endswith("two.") and not gate.is_set():
                assert not session.trajectory.turns, "the reply has not ended"
                gate.set()
    deltas = [each.choices[0].delta for each in chunks if each.choices]
    assert deltas[0].role == "assistant"
    assert "".join(getattr(each, "reasoning_content", None) or "" for each in deltas) == "hm"
    assert "".join(each.content or "" for each in deltas) == "I add one and two."
    assert len([each for each in deltas if each.content]) > 3
    assert next(each.tool_calls[0].function.name for each in deltas if each.tool_calls) == "add"
    assert chunks[-2].choices[0].finish_reason == "tool_calls"
    assert (
        chunks[-1].usage.completion_tokens
        == len(session.trajectory.segments[0].ids) - chunks[-1].usage.prompt_tokens
    )
    # What the agent puts together of it is known as what was sampled.
    call = next(each.tool_calls[0] for each in deltas if each.tool_calls)
    said = {
        "role": "assistant",
        "content": "I add one and two.",
        "tool_calls": [
            {"id": call.id, "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}
        ],
    }
    result = {"role": "tool", "content": "3", "tool_call_id": call.id}
    await client.chat.completions.create(model="policy", messages=[*HI, said, result], tools=[TOOL])
    assert len(session.trajectory.segments) == 1


async def test_events_of_a_response_come_in_order_as_it_is_sampled(talk):
    gate = asyncio.Event()
    client, session, _ = await talk([f"<think>\nhm hm\n</think>\n\nI add now.\n{CALL}", "next"], gate=gate)
    tool = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}
    async with asyncio.timeout(20):
        stream = await client.responses.create(model="policy", input="Hi", tools=[tool], stream=True)
        events, said = [], ""
        async for event in stream:
            events.append(event)
            said += event.delta if event.type == "response.output_text.delta" else ""
            if said.endswith("now.") and not gate.is_set():
                assert not session.trajectory.turns
                gate.set()
    kinds = [event.type.removeprefix("response.") for event in events]
    plain = [kind for place, kind in enumerate(kinds) if place == 0 or kind != kinds[place - 1]]
    assert plain == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done"),
        *("output_item.done", "completed"),
    ]
    assert kinds.count("output_text.delta") > 1
    assert [event.sequence_number for event in events] == list(range(len(events)))
    final = events[-1].response
    assert (
        "".join(e.delta for e in events if e.type == "response.output_text.delta")
        == final.output_text
        == "I add now."
    )
    assert "".join(e.delta for e in events if e.type == "response.reasoning_text.delta") == "hm hm"
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.model_dump() for item in done] == [item.model_dump() for item in final.output]
    outputs = [{"type": "function_call_output", "call_id": done[2].call_id, "output": "3"}]
    await client.responses.create(model="policy", input=outputs, previous_response_id=final.id, tools=[tool])
    assert len(session.trajectory.segments) == 1


@pytest.mark.parametrize("api", ["chat/completions", "responses"])
async def test_who_leaves_in_the_middle_ends_the_sampling(talk, api):
    client, session, policy = await talk(["one two three four"], gate=asyncio.Event())
    body = {"messages": HI} if api == "chat/completions" else {"input": "Hi"}
    async with asyncio.timeout(20), httpx.AsyncClient() as http:
        async with http.stream("POST", f"{client.base_url}{api}", json={**body, "stream": True}) as answer:
            async for line in answer.aiter_lines():
                if "two" in line:
                    break
        while session.busy:
            await asyncio.sleep(0.005)
    assert policy.cancelled == 1
    assert session.counts.abandoned == 1
    assert not session.trajectory.turns


class BreakingPolicy(TellingPolicy):
    async def generate(self, request):
        if request.on_tokens is not None:
            request.on_tokens(TOKENIZER.encode("one two three", add_special_tokens=False))
            await self._gate.wait()
        raise RuntimeError("out of memory")


@pytest.mark.parametrize("api", ["chat", "responses"])
async def test_a_failure_in_the_middle_is_told_in_the_stream(talk, api):
    gate = asyncio.Event()
    client, session, _ = await talk([], policy=BreakingPolicy, gate=gate)
    async with asyncio.timeout(20):
        if api == "chat":
            stream = await client.chat.completions.create(model="policy", messages=HI, stream=True)
            gate.set()
            with pytest.raises(openai.APIError, match="the request failed"):
                async for _ in stream:
                    pass
        else:
            stream = await client.responses.create(model="policy", input="Hi", stream=True)
            gate.set()
            *_, last = [event async for event in stream]
            assert (last.type, last.response.status) == ("response.failed", "failed")
            assert "the request failed" in last.response.error.message
    assert str(session.model_failure) == "out of memory"
    assert not session.trajectory.turns


async def test_what_fails_before_the_first_word_has_a_status(talk):
    def broken(prompt):
        raise RuntimeError("out of memory")

    client, _, _ = await talk(broken)
    with pytest.raises(openai.InternalServerError):
        await client.chat.completions.create(model="policy", messages=HI, stream=True)
    with pytest.raises(openai.BadRequestError):
        await client.chat.completions.create(model="policy", messages=HI, stream=True, max_tokens=0)


async def test_several_choices_may_be_streamed(talk):
    client, session, _ = await talk(["a b c", "d e f"])
    got = {0: "", 1: ""}
    async for chunk in await client.chat.completions.create(model="policy", messages=HI, stream=True, n=2):
        got[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert got == {0: "a b c", 1: "d e f"}
    assert len(session.trajectory.turns) == 2


def test_choices_of_a_stream_begin_in_their_order_whichever_is_sampled_first():
    answer = Completion(0, "a", 0, [1], (), ())
    chunks = ChatChunks(AgentCall([]), answer, "policy")
    said = [*chunks.says(2, [Delta("content", "c")]), *chunks.says(0, [Delta("content", "a")])]
    told = [(chunk["choices"][0]["index"], chunk["choices"][0]["delta"]) for chunk in said]
    begin = {"role": "assistant", "content": ""}
    assert told == [(0, begin), (1, begin), (2, begin), (2, {"content": "c"}), (0, {"content": "a"})]


async def test_the_embedded_engine_tells_its_tokens():
    """Those of rows that join and leave at different steps, each once and in order, before the reply ends."""
    tokenizer = tokenizer_of("qwen2.5")
    shape = TinyPolicySettings(len(tokenizer), hidden_size=16, layers=1, heads=2, max_length=2048)
    async with TorchEngine(build_tiny_model(shape, 0), max_rows=2, max_length=2048) as engine:

        async def generate(number):
            told = []
            sampling = SamplingParams(max_new_tokens=4 + 3 * number)
            request = GenerationRequest(f"r{number}", [1, 2, 3], sampling, number, on_tokens=told.extend)
            running = asyncio.create_task(engine.generate(request))
            while len(told) < 2:
                await asyncio.sleep(0.001)
            assert not running.done()
            return told, (await running).token_ids

        for told, ids in await asyncio.gather(*(generate(number) for number in range(5))):
            assert told == ids


QWEN_CALL = (
    "<tool_call>\n<function=note>\n<parameter=text>\n12\n</parameter>\n<parameter=body>\none </think>\n\n"
    "</parameter> two\n\n</parameter>\n<parameter=count>\n12\n</parameter>\n</function>\n</tool_call>"
)
NOTE = {
    "type": "function",
    "function": {
        "name": "note",
        "parameters": {
            "type": "object",
            "properties": {
                "text": {"type": "string"},
                "body": {"type": "string"},
                "count": {"type": "integer"},
            },
        },
    },
}


@pytest.mark.parametrize(
    ("tool_format", "tool", "said", "arguments"),
    [
        ("hermes", TOOL, CALL, {"a": 1}),
        (
            "qwen-xml",
            NOTE,
            QWEN_CALL,
            {"text": "12", "body": "one </think>\n\n</parameter> two\n", "count": 12},
        ),
    ],
)
async def test_ids_and_arguments_of_a_streamed_call_are_those_that_were_sampled(
    talk, tool_format, tool, said, arguments
):
    script = [f"<think>\nhm\n</think>\n\nI do.\n{said}", "so"]
    client, session, policy = await talk(script, tool_format=tool_format)
    ids, deltas = [], []
    async for chunk in await client.chat.completions.create(
        model="policy", messages=HI, tools=[tool], stream=True, extra_body={"return_token_ids": True}
    ):
        ids += getattr(chunk.choices[0], "token_ids", None) or []
        deltas.append(chunk.choices[0].delta)
    assert ids == policy.log.calls[0][1].token_ids
    parts = [call for delta in deltas for call in delta.tool_calls or ()]
    handed = "".join(part.function.arguments or "" for part in parts)
    assert json.loads(handed) == arguments
    # An agent that puts the call together sends it back, and the prompt begins with the very ids.
    function = {"name": tool["function"]["name"], "arguments": handed}
    message = {
        "role": "assistant",
        "content": "I do.",
        "tool_calls": [{"id": parts[0].id, "type": "function", "function": function}],
    }
    result = {"role": "tool", "content": "3", "tool_call_id": parts[0].id}
    await client.chat.completions.create(model="policy", messages=[*HI, message, result], tools=[tool])
    first, second = (request.prompt_ids for request, _ in policy.log.calls)
    assert second[: len(first) + len(ids)] == [*first, *ids]
    assert len(session.trajectory.segments) == 1
