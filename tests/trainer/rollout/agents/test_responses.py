"""The Responses API as the plain `openai` package uses it."""

import json

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

TOKENIZER = tool_tokenizer()
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TOOL = {
    "type": "function",
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object"},
    "strict": False,
}


@pytest.fixture
async def talk():
    """Makes (client, session, policy) of an endpoint whose policy says a script."""
    opened = []

    async def make(*script, **service):
        policy = ScriptedPolicy(TOKENIZER, script)
        context = endpoint_of(service_of(policy, TOKENIZER, **service))
        endpoint = await context.__aenter__()
        key, session = endpoint.open()
        client = openai.AsyncOpenAI(base_url=f"{endpoint.url}/s/{key}/v1", api_key="x", max_retries=0)
        opened.append((context, client, session, policy))
        return client.responses, session, policy

    yield make
    for context, client, session, policy in opened:
        await client.close()
        await context.__aexit__(None, None, None)
        assert_recorded(session.trajectory, policy.log)


async def test_a_response(talk):
    responses, session, policy = await talk("<think>\nhm\n</think>\n\nHello")
    got = await responses.create(model="policy", input="Hi", instructions="Be kind.")
    assert got.output_text == "Hello"
    assert [item.type for item in got.output] == ["reasoning", "message"]
    assert got.output[0].content[0].text == "hm"
    assert (got.status, got.instructions) == ("completed", "Be kind.")
    assert got.usage.input_tokens == len(policy.log.calls[0][0].prompt_ids)
    assert "<|im_start|>system\nBe kind.<|im_end|>" in TOKENIZER.decode(policy.log.calls[0][0].prompt_ids)
    assert len(session.trajectory.turns) == 1


@pytest.mark.parametrize("stateful", [True, False])
async def test_calls_and_their_outputs_are_one_segment(talk, stateful):
    responses, session, _ = await talk(f"<think>\nadd\n</think>\n\nSo.\n{CALL}{CALL}", "2", "bye")
    asked = [{"role": "user", "content": [{"type": "input_text", "text": "1 + 1?"}]}]
    got = await responses.create(model="policy", input=asked, tools=[TOOL], instructions="Add.")
    calls = [item for item in got.output if item.type == "function_call"]
    assert [json.loads(call.arguments) for call in calls] == [{"a": 1}] * 2
    outputs = [{"type": "function_call_output", "call_id": call.call_id, "output": "2"} for call in calls]
    history = [*asked, *[item.model_dump(exclude_none=True) for item in got.output], *outputs]
    then = {"input": outputs, "previous_response_id": got.id} if stateful else {"input": history}
    got = await responses.create(model="policy", tools=[TOOL], instructions="Add.", **then)
    assert got.output_text == "2"
    if stateful:
        then = {"input": "bye", "previous_response_id": got.id}
    else:
        items = [item.model_dump(exclude_none=True) for item in got.output]
        then = {"input": [*history, *items, {"role": "user", "content": "bye"}]}
    await responses.create(model="policy", tools=[TOOL], instructions="Add.", **then)
    assert len(session.trajectory.segments) == 1
    assert TOKENIZER.decode(session.trajectory.segments[0].ids).count("Add.<|im_end|>") <= 1


async def test_events_come_in_order(talk):
    responses, _, _ = await talk(f"<think>\nhm\n</think>\n\nSo.\n{CALL}", "x")
    stream = await responses.create(model="policy", input="Hi", tools=[TOOL], stream=True)
    events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    added = {
        event.output_index: event.item.id for event in events if event.type == "response.output_item.added"
    }
    done = {
        event.output_index: event.item.id for event in events if event.type == "response.output_item.done"
    }
    assert added == done
    assert list(done.values()) == [item.id for item in events[-1].response.output]
    # The library's own accumulation agrees.
    async with responses.stream(model="policy", input="Hi", tools=[TOOL]) as accumulated:
        async for _ in accumulated:
            pass
        assert (await accumulated.get_final_response()).output_text == "x"


async def test_a_reply_that_was_cut_off_is_incomplete(talk):
    responses, _, _ = await talk("one two three four five", sampling=SamplingParams(max_new_tokens=512))
    got = await responses.create(model="policy", input="Hi", max_output_tokens=2)
    assert (got.status, got.incomplete_details.reason) == ("incomplete", "max_output_tokens")


async def test_log_probabilities_are_given_where_they_are_wanted(talk):
    responses, _, policy = await talk("Hello")
    got = await responses.create(model="policy", input="Hi", include=["message.output_text.logprobs"])
    assert [each.logprob for each in got.output[0].content[0].logprobs] == policy.log.calls[0][1].logprobs


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"input": []}, 400, "input"),
        ({"input": 5}, 400, "input"),
        ({"input": [{"type": "computer_call"}]}, 400, "input[0]"),
        ({"input": [{"role": "tool", "content": "x"}]}, 400, "input[0].role"),
        ({"input": [{"type": "function_call"}]}, 400, "input[0].name"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, 400, "input[0].call_id"),
        ({"previous_response_id": "resp_unknown"}, 404, "previous_response_id"),
        ({"background": True}, 400, "background"),
        ({"tools": [{"type": "web_search"}]}, 400, "tools[0]"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, 400, "text.format.schema"),
        ({"include": 0}, 400, "include"),
        ({"conversation": "c"}, 400, "conversation"),
        ({"include": 5}, 400, "include"),
        ({"input": [{"type": "reasoning", "summary": 5}]}, 400, "input[0].summary"),
    ],
)
async def test_what_cannot_be_done_is_refused_by_name(talk, fields, status, param):
    responses, _, _ = await talk()
    with pytest.raises(openai.APIStatusError) as caught:
        await responses.create(**{"model": "policy", "input": "Hi", **fields})
    assert (caught.value.status_code, caught.value.param) == (status, param)
