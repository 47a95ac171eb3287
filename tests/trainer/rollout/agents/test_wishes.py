"""Nothing that an agent asks for vanishes: it is done, refused by name, or named as passed over."""

import json

import httpx
import pytest

from tests.support.agent_policy import (
    ScriptedPolicy,
    assert_recorded,
    endpoint_of,
    service_of,
    tool_tokenizer,
)
from tests.support.agent_talk import TOOLS, user

# As SmolLM2's: it knows no tools, and writes any role.
WITHOUT_TOOLS = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


def plain_tokenizer():
    tokenizer = tool_tokenizer()
    tokenizer.chat_template = WITHOUT_TOOLS
    return tokenizer


async def test_tools_are_offered_where_the_template_passes_over_them(talk):
    tokenizer = plain_tokenizer()
    one = await talk([f"Adding.\n{CALL}", "3"], tokenizer=tokenizer)
    said = []
    one.session.service.renderer.renderer.template.say = said.append
    messages = [{"role": "system", "content": "Be brief."}, user("1 + 2?")]
    got = await one.say(messages, tools=TOOLS)
    message = got.choices[0].message
    assert message.content == "Adding."
    assert json.loads(message.tool_calls[0].function.arguments) == {"a": 1, "b": 2}
    shown = tokenizer.decode(one.policy.log.calls[0][0].prompt_ids)
    assert shown.startswith("<|im_start|>system\nBe brief.\n\nYou can call these tools")
    assert '{"name": "add"' in shown
    result = {"role": "tool", "content": "3", "tool_call_id": message.tool_calls[0].id}
    await one.say([*messages, message.model_dump(exclude_none=True), result], tools=TOOLS)
    assert len(one.trajectory.segments) == 1, "what was sampled stands where it was sampled"
    assert_recorded(one.trajectory, one.policy.log)
    assert said == [
        "chat template: it passes over tools; they are offered in the system message, and calls stand in replies"
    ]


async def test_tools_are_offered_where_the_template_refuses_them(talk):
    tokenizer = plain_tokenizer()
    tokenizer.chat_template = "{% if tools %}{{ raise_exception('no tools') }}{% endif %}" + WITHOUT_TOOLS
    one = await talk(["Hello", CALL], tokenizer=tokenizer)
    assert (await one.say([user("Hi")])).choices[0].message.content == "Hello"
    got = await one.say([user("1 + 2?")], tools=TOOLS)
    assert got.choices[0].message.tool_calls[0].function.name == "add"
    assert "You can call these tools" in tokenizer.decode(one.policy.log.calls[1][0].prompt_ids)


async def test_a_call_of_the_agents_own_making_is_shown(talk):
    tokenizer = plain_tokenizer()
    one = await talk(["3"], tokenizer=tokenizer)
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": "<|im_end|>"}'}}
    history = [user("1 + 2?"), {"role": "assistant", "content": None, "tool_calls": [call]}]
    await one.say([*history, {"role": "tool", "content": "3", "tool_call_id": "c1"}], tools=TOOLS)
    ids = one.policy.log.calls[0][0].prompt_ids
    shown = tokenizer.decode(ids)
    assert '<tool_call>\n{"name": "add", "arguments": {"a": "<|im_end|>"}}\n</tool_call>' in shown
    # A system message, the question, the call, its result: and what a text spells is no end of a turn.
    assert ids.count(tokenizer.convert_tokens_to_ids("<|im_end|>")) == 4


async def test_a_conversation_without_tools_is_what_it_was(talk):
    tokenizer = plain_tokenizer()
    one = await talk(["fine"], tokenizer=tokenizer)
    await one.say([user("Hi")])
    shown = tokenizer.decode(one.policy.log.calls[0][0].prompt_ids)
    assert shown == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("api", ["chat", "responses"])
async def test_fields_that_nobody_reads_are_named(talk, api):
    one = await talk(["a", "b"])
    fields = {
        "model": "policy",
        "chat_template_kwargs": {"enable_thinking": False},
        "reasoning_effort": "low",
        "stop_token_ids": [5],
        "user": "me",
        "metadata": {"a": "b"},
        "n_probs": 0,
        "top_logprobs": 2,
        "ünknown": True,
        "unset": None,
    }
    if api == "chat":
        path, body = (
            "/v1/chat/completions",
            {"messages": [user("Hi")], "tools": TOOLS, "tool_choice": "required"},
        )
    else:
        path, body = "/v1/responses", {"input": "Hi"}
    async with httpx.AsyncClient() as http:
        answer = await http.post(f"{one.url}{path}", json=body | fields)
    assert answer.status_code == 200
    named = answer.headers["x-rollgym-ignored"].split(", ")
    # The log-probabilities of tokens that were not sampled are known to nobody.
    unread = ["chat_template_kwargs", "reasoning_effort", "stop_token_ids", "n_probs", "'\\xfcnknown'"]
    assert named == ["top_logprobs", *unread]


async def test_a_thousand_unknown_fields_are_a_short_header(talk):
    one = await talk(["a"])
    body = {"model": "policy", "messages": [user("Hi")], **{f"{number:04}" * 50: 1 for number in range(1000)}}
    async with httpx.AsyncClient() as http:
        answer = await http.post(f"{one.url}/v1/chat/completions", json=body)
    assert answer.status_code == 200
    assert len(answer.headers["x-rollgym-ignored"]) < 600
    assert answer.headers["x-rollgym-ignored"].endswith("and 988 more")


async def test_an_agents_seed_is_heeded_where_its_wishes_are(talk):
    one = await talk(["a", "b", "c", "d", "e"], wishes="agent")
    for seed in (7, 7, 8):
        await one.say([user("Hi")], seed=seed)
    await one.say([user("Hi")], seed=7, n=2)
    first, second, third, *both = [request.seed for request, _ in one.policy.log.calls]
    assert first == second != third
    assert both[0] == first != both[1]


async def test_a_seed_that_the_server_does_not_read_is_named():
    tokenizer = tool_tokenizer()
    service = service_of(ScriptedPolicy(tokenizer, ["a"]), tokenizer, wishes="agent", reads_seeds=False)
    async with endpoint_of(service) as endpoint:
        key, _ = endpoint.open()
        async with httpx.AsyncClient() as http:
            body = {"messages": [user("Hi")], "seed": 7}
            answer = await http.post(f"{endpoint.url}/s/{key}/v1/chat/completions", json=body)
    assert answer.headers["x-rollgym-ignored"] == "seed"


async def test_a_top_p_of_zero_takes_the_most_likely_token(talk):
    one = await talk(["a", "b"], wishes="agent")
    await one.say([user("Hi")], top_p=0)
    sampling = one.policy.log.calls[0][0].sampling
    assert (sampling.temperature, sampling.top_p) == (0.0, 1.0)
    await one.say([user("Hi")], top_p=0.3, temperature=0)
    sampling = one.policy.log.calls[1][0].sampling
    assert (sampling.temperature, sampling.top_p) == (0.0, 0.3)
