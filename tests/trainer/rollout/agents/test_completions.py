"""`/v1/completions` by the `openai` package: texts and token ids that the policy goes on with, recorded like chats."""

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

TOKENIZER = tool_tokenizer()
END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")


class Talk:
    def __init__(self, endpoint, policy):
        self.policy = policy
        key, self.session = endpoint.open(max_calls=5)
        self.url = f"{endpoint.url}/s/{key}/v1"
        self.openai = openai.AsyncOpenAI(base_url=self.url, api_key="any", max_retries=0)

    async def say(self, prompt, **fields):
        return await self.openai.completions.create(
            **{"model": "policy", "prompt": prompt, "max_tokens": 100} | fields
        )

    @property
    def prompts(self):
        return [request.prompt_ids for request, _ in self.policy.log.calls]


@asynccontextmanager
async def talk(script, *, cut=False, **service):
    policy = ScriptedPolicy(TOKENIZER, script)
    async with endpoint_of(service_of(policy, TOKENIZER, **service)) as endpoint:
        one = Talk(endpoint, policy)
        yield one
        await one.openai.close()
    if not cut:  # by a text that ends replies: the record then has less than the engine drew
        assert_recorded(one.session.trajectory, policy.log)


async def test_a_text_is_gone_on_with_and_recorded_without_a_template():
    async with talk([" a time"]) as one:
        got = await one.say("Once upon", logprobs=0, extra_body={"return_token_ids": True})
        ((request, result),) = one.policy.log.calls
    assert request.prompt_ids == TOKENIZER.encode("Once upon", add_special_tokens=False)
    choice = got.choices[0]
    assert (got.object, choice.text, choice.finish_reason) == ("text_completion", " a time", "stop")
    assert choice.logprobs.token_logprobs == result.logprobs
    assert "".join(choice.logprobs.tokens) == " a time<|im_end|>"
    assert choice.logprobs.text_offset[0] == 0
    assert (choice.prompt_token_ids, choice.token_ids) == (request.prompt_ids, result.token_ids)
    assert (got.usage.prompt_tokens, got.usage.completion_tokens) == (
        len(request.prompt_ids),
        len(result.token_ids),
    )
    (turn,) = one.session.trajectory.turns
    assert (turn.observation, turn.reply) == ("Once upon", " a time")


async def test_token_ids_are_read_as_they_are_and_the_usual_length_is_the_apis():
    ids = [5, 7, 11]
    async with talk(["x" * 200]) as one:
        got = await one.openai.completions.create(model="policy", prompt=ids)
    assert one.prompts == [ids]
    assert len(one.policy.log.calls[0][1].token_ids) == 16
    assert got.choices[0].finish_reason == "length"


async def test_several_prompts_have_several_replies_each_in_their_order():
    async with talk(lambda prompt: f"[{prompt}]") as one:
        got = await one.say(["ab", "c"], n=2, echo=True)
    assert [choice.text for choice in got.choices] == ["ab[ab]", "ab[ab]", "c[c]", "c[c]"]
    assert [choice.index for choice in got.choices] == [0, 1, 2, 3]
    assert got.usage.prompt_tokens == sum(len(TOKENIZER.encode(each)) for each in ("ab", "c"))
    assert len({request.seed for request, _ in one.policy.log.calls}) == 4
    assert len(one.session.turns_of[0]) == 4


@pytest.mark.parametrize("echo", [False, True])
async def test_streams_add_up(echo):
    async with talk(lambda prompt: f"<think>{prompt}\n") as one:
        texts, reasons = {}, {}
        stream = await one.say(
            ["ab", "c"], echo=echo, stream=True, stream_options={"include_usage": True}, logprobs=None
        )
        async for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] = texts.get(choice.index, "") + choice.text
                reasons[choice.index] = choice.finish_reason
    before = ("ab", "c") if echo else ("", "")
    assert texts == {0: f"{before[0]}<think>ab\n", 1: f"{before[1]}<think>c\n"}
    assert set(reasons.values()) == {"stop"}
    assert chunk.usage.completion_tokens == sum(len(each.token_ids) for _, each in one.policy.log.calls)


async def test_what_was_sampled_stays_as_it_was_sampled_in_a_text_that_goes_on():
    """As agents of the ReAct kind write: the reply stops at a word, and the observation comes behind it."""
    async with talk(["Thought: go\nObservation: xyz", "done"], cut=True) as one:
        first = await one.say("Question\n", stop=["\nObservation:"])
        assert first.choices[0].text == "Thought: go"
        assert first.choices[0].finish_reason == "stop"
        await one.say("Question\nThought: go\nObservation: wall")
    before, after = one.prompts
    (segment,) = one.session.trajectory.segments
    first, second = one.session.trajectory.turns
    kept = segment.ids[first.start : first.end]
    assert kept == one.policy.log.calls[0][1].token_ids[: len(kept)]
    assert TOKENIZER.decode(kept) == "Thought: go\nObservation:"
    assert after[: second.start] == segment.ids[: second.start] == after
    assert after[: first.end] == before + kept


async def test_control_tokens_of_the_agents_own_template_are_control_tokens():
    async with talk(["ok"]) as one:
        await one.say("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert END in one.prompts[0]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt[0]"),
        ({"prompt": []}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": [1.5]}, "prompt[0]"),
        ({"prompt": [[1], "a", []]}, "prompt[2]"),
        ({"prompt": ["a"] * 65}, "prompt"),
        ({"prompt": [1 << 40]}, "prompt"),
        ({"n": 9}, "n"),
        ({"n": True}, "n"),
        ({"best_of": 3}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"logprobs": 1}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 0, "echo": True}, "logprobs"),
        ({"echo": "yes"}, "echo"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": False}, "stop"),
        ({"response_format": {"type": "xml"}}, "response_format"),
    ],
)
async def test_what_cannot_be_done_is_refused_by_name(fields, param):
    async with talk([]) as one, httpx.AsyncClient() as http:
        body = {"model": "policy", "prompt": "Hi"} | fields
        answer = await http.post(f"{one.url}/completions", json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400, error
    assert error["param"] == param or (param == "prompt" and error["param"].startswith("prompt"))
    assert one.session.counts.refused == 1


async def test_a_prompt_without_room_is_refused_and_no_turn():
    sampling = SamplingParams(8, stop_token_ids=(END,))
    async with talk(["x"], max_length=20, sampling=sampling) as one:
        with pytest.raises(openai.BadRequestError, match="passes the longest row of 20"):
            await one.say(["a", "b " * 100])
        assert (await one.say("a", max_tokens=4)).choices[0].text == "x"
    assert len(one.session.trajectory.turns) == 1


async def test_fields_that_nobody_reads_are_named():
    async with talk(["x"]) as one, httpx.AsyncClient() as http:
        body = {"prompt": "Hi", "temperature": 0.3, "min_p": 0.1, "use_beam_search": True, "user": "me"}
        answer = await http.post(f"{one.url}/completions", json=body)
    assert answer.headers["x-rollgym-ignored"].split(", ") == ["temperature", "min_p", "use_beam_search"]
