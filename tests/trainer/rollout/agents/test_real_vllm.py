"""What agents ask of replies, held to by a real vLLM with a model that says anything: forms, and calls that must come.

ROLLGYM_VLLM=/opt/vllm/bin/vllm python -m pytest tests/trainer/rollout/agents/test_real_vllm.py
"""

import asyncio
from contextlib import asynccontextmanager

import openai
import pytest

from rollgym.trainer.inference.server_client.client import ServerClient
from rollgym.trainer.models.tiny import TinyPolicySettings, build_tiny_model
from tests.support.agent_talk import user
from tests.support.called_tools import NAMED, TURN, asked, checked
from tests.support.structured_talk import SCHEMA, TOKENIZER, Move, sampling, talk
from tests.trainer.learn.weights.test_real_vllm import pytestmark, served  # noqa: F401 - skips without a program

MAX_LENGTH = 1024
_TRIES = 12


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """One server for all tests, in a loop of its own."""
    model = build_tiny_model(TinyPolicySettings(len(TOKENIZER), layers=1, heads=2, max_length=MAX_LENGTH), 0)
    loop = asyncio.new_event_loop()
    server = served(
        tmp_path_factory.mktemp("vllm"), model=model.eval(), tokenizer=TOKENIZER, max_length=MAX_LENGTH
    )
    try:
        yield loop.run_until_complete(server.__aenter__())
        loop.run_until_complete(server.__aexit__(None, None, None))
    finally:
        loop.close()


@asynccontextmanager
async def talking(url):
    client = ServerClient(url, "vllm", way="disk", patience_s=60.0)
    async with client, talk(client, **sampling()) as one:
        yield one


async def come_to_its_end(ask):
    """What an answer holds that was not cut off: in JSON the model may go on with blanks for as long as it may speak.

    Args:
        ask: Gives the answer, or None where it was cut off.
    """
    for _ in range(_TRIES):
        try:
            if (answer := await ask()) is not None:
                return answer
        except openai.LengthFinishReasonError:
            continue
    raise AssertionError(f"{_TRIES} replies in a row did not come to their end")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("choice", "names"),
    [("required", {"turn", "halt"}), (NAMED, {"turn"})],
    ids=["required", "named"],
)
async def test_what_must_be_called_is_called(url, choice, names, stream):
    async def called():
        (answer,) = await asked(one, stream=stream, tool_choice=choice, parallel_tool_calls=False, n=1)
        return answer if answer.finish_reason != "length" else None

    async with talking(url) as one:
        answer = await come_to_its_end(called)
    assert answer.finish_reason == "tool_calls"
    assert names.issuperset(checked(answer.message.tool_calls))
    assert not answer.message.content
    assert all(turn.structured for turn in one.session.trajectory.turns)


async def test_other_apis_hold_to_it_too(url):
    async def response():
        answer = await one.openai.responses.create(
            model="policy",
            input="Where to?",
            tools=[{"type": "function", "name": "turn", "parameters": TURN}],
            tool_choice="required",
            parallel_tool_calls=False,
        )
        return [item.name for item in answer.output] if answer.status == "completed" else None

    async def message():
        answer = await one.anthropic.messages.create(
            model="policy",
            max_tokens=400,
            messages=[user("Where to?")],
            tools=[{"name": "turn", "input_schema": TURN}],
            tool_choice={"type": "any", "disable_parallel_tool_use": True},
        )
        return [block.name for block in answer.content] if answer.stop_reason != "max_tokens" else None

    async with talking(url) as one:
        assert await come_to_its_end(response) == ["turn"]
        assert await come_to_its_end(message) == ["turn"]


async def test_replies_have_the_form_that_was_asked_for(url):
    async def parsed():
        answer = await one.openai.chat.completions.parse(
            model="policy", messages=[user("Where to?")], response_format=Move
        )
        return answer.choices[0].message.parsed

    async def message():
        answer = await one.anthropic.messages.create(
            model="policy",
            max_tokens=400,
            messages=[user("Where to?")],
            extra_body={"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        )
        return answer.content[0].text if answer.stop_reason != "max_tokens" else None

    async with talking(url) as one:
        assert (await come_to_its_end(parsed)).move in ("Left", "Right")
        assert Move.model_validate_json(await come_to_its_end(message))
        anything = await one.say(response_format={"type": "json_object"}, max_tokens=60)
        assert anything.choices[0].message.content.lstrip().startswith("{")
        for fields in (
            {"guided_choice": ["Left", "Right"]},
            {"guided_regex": "Left|Right"},
            {"structured_outputs": {"choice": ["Left", "Right"]}},
            {"ebnf": 'root ::= "Left" | "Right"'},
        ):
            got = await one.say(extra_body=fields, n=2)
            assert {each.message.content for each in got.choices} <= {"Left", "Right"}
    assert all(turn.structured for turn in one.session.trajectory.turns)
