"""What agents ask of replies, held to by a real vLLM with a model that says anything: forms, and calls that must come.

ROLLGYM_VLLM=/opt/vllm/bin/vllm python -m pytest tests/trainer/rollout/agents/test_real_vllm.py
"""

import asyncio
from contextlib import asynccontextmanager

import pytest

from rollgym.trainer.inference.server_client import ServerClient
from rollgym.trainer.models.tiny import TinyPolicySettings, build_tiny_model
from tests.trainer.learn.weights.test_real_vllm import pytestmark, served  # noqa: F401 - skips without a program
from tests.trainer.rollout.agents.test_endpoint import user
from tests.trainer.rollout.agents.test_structured import SCHEMA, TOKENIZER, Move, sampling, talk
from tests.trainer.rollout.agents.test_tool_choice import NAMED, TURN, asked, checked

MAX_LENGTH = 1024


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


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("choice", "names"),
    [("required", {"turn", "halt"}), (NAMED, {"turn"})],
    ids=["required", "named"],
)
async def test_what_must_be_called_is_called(url, choice, names, stream):
    async with talking(url) as one:
        choices = await asked(one, stream=stream, tool_choice=choice, parallel_tool_calls=False)
    whole = [each for each in choices if each.finish_reason != "length"]
    assert whole
    for each in whole:
        assert each.finish_reason == "tool_calls"
        assert names.issuperset(checked(each.message.tool_calls))
        assert not each.message.content
    assert all(turn.structured for turn in one.session.trajectory.turns)


async def test_other_apis_hold_to_it_too(url):
    async with talking(url) as one:
        response = await one.openai.responses.create(
            model="policy",
            input="Where to?",
            tools=[{"type": "function", "name": "turn", "parameters": TURN}],
            tool_choice="required",
            parallel_tool_calls=False,
        )
        assert [item.name for item in response.output] == ["turn"]
        message = await one.anthropic.messages.create(
            model="policy",
            max_tokens=400,
            messages=[user("Where to?")],
            tools=[{"name": "turn", "input_schema": TURN}],
            tool_choice={"type": "any", "disable_parallel_tool_use": True},
        )
        assert [block.name for block in message.content] == ["turn"]


async def test_replies_have_the_form_that_was_asked_for(url):
    async with talking(url) as one:
        got = await one.openai.chat.completions.parse(
            model="policy", messages=[user("Where to?")], response_format=Move
        )
        assert got.choices[0].message.parsed.move in ("Left", "Right")
        message = await one.anthropic.messages.create(
            model="policy",
            max_tokens=400,
            messages=[user("Where to?")],
            extra_body={"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        )
        assert Move.model_validate_json(message.content[0].text)
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
