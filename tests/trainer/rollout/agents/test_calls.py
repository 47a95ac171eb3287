"""`tool_choice` as the APIs have it, held to by a real engine."""

import json
import sys

import jsonschema
import openai
import pytest

from rollgym.trainer.inference.errors import StructuredOutputError
from rollgym.trainer.rollout.agents.calls import ToolChoice, read_tool_choice
from rollgym.trainer.rollout.agents.errors import ApiError
from tests.support.agent_policy import ScriptedPolicy
from tests.support.agent_talk import CALL, user
from tests.support.called_tools import NAMED, TOOLS, TURN, asked, checked, tool
from tests.support.structured_talk import FORMAT, SCHEMA, TOKENIZER, sampling, talk


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("choice", "names"),
    [("required", {"turn", "halt"}), (NAMED, {"turn"})],
    ids=["required", "named"],
)
async def test_a_random_model_calls_what_it_must_call(engine, choice, names, stream):
    async with talk(engine, **sampling()) as one:
        # A stream whose reply is cut off is an error of the library.
        choices = await asked(one, stream=stream, tool_choice=choice, parallel_tool_calls=not stream)
    whole = [each for each in choices if each.finish_reason != "length"]
    assert whole
    for each in whole:
        assert each.finish_reason == "tool_calls"
        called = checked(each.message.tool_calls)
        assert names.issuperset(called)
        assert len(called) == 1 or choice == "required"
        assert not each.message.content
    assert all(turn.structured for turn in one.session.trajectory.turns)


async def test_the_other_apis_hold_to_it_too(engine):
    flat = [{"type": "function", "name": "turn", "parameters": TURN}]
    theirs = [{"name": "turn", "input_schema": TURN}]
    async with talk(engine, **sampling()) as one:
        for choice in ("required", {"type": "function", "name": "turn"}):
            response = await one.openai.responses.create(
                model="policy", input="Where to?", tools=flat, tool_choice=choice, parallel_tool_calls=False
            )
            (item,) = response.output
            jsonschema.validate(json.loads(item.arguments), TURN)
        for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "turn"}):
            raw = await one.anthropic.messages.with_raw_response.create(
                model="policy", max_tokens=400, messages=[user("Where to?")], tools=theirs, tool_choice=choice
            )
            assert "x-rollgym-ignored" not in raw.headers
            message = await raw.parse()
            (block,) = message.content
            assert (message.stop_reason, block.name) == ("tool_use", "turn")
            jsonschema.validate(block.input, TURN)


@pytest.mark.parametrize("stream", [False, True])
async def test_beside_a_form_a_random_model_calls_or_answers(engine, stream):
    async with talk(engine, **sampling()) as one:
        first = await asked(one, stream=stream, response_format=FORMAT, parallel_tool_calls=False)
        again = await asked(one, stream=stream, response_format=FORMAT, parallel_tool_calls=False)
    kinds = set()
    for each in (*first, *again):
        kinds.add(each.finish_reason)
        if each.message.tool_calls:
            checked(each.message.tool_calls)
        else:
            jsonschema.validate(json.loads(each.message.content), SCHEMA)
    assert kinds == {"stop", "tool_calls"}


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_quotes_a_call_is_an_answer(stream):
    said = json.dumps({"move": CALL})
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    async with talk(ScriptedPolicy(TOKENIZER, [said, CALL])) as one:
        for content, names in ((said, []), ("", ["add"])):
            fields = {"messages": [user("Hi")], "model": "policy", "tools": [tool("add", TURN)]}
            if stream:
                async with one.openai.chat.completions.stream(**fields, response_format=form) as events:
                    got = await events.get_final_completion()
            else:
                got = await one.openai.chat.completions.create(**fields, response_format=form)
            message = got.choices[0].message
            assert (message.content or "") == content
            assert [each.function.name for each in message.tool_calls or []] == names


ODD = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=a)b"}}}


@pytest.mark.parametrize("stream", [False, True])
async def test_what_an_engine_cannot_hold_to_is_named_and_sampled_without(engine, stream):
    async with talk(engine, **sampling()) as one:
        fields = {"model": "policy", "messages": [user("Hi")], "tools": [tool("odd", ODD)], "max_tokens": 5}
        fields |= {"tool_choice": "required", "n": 2, "stream": stream}
        raw = await one.openai.chat.completions.with_raw_response.create(**fields)
        assert raw.headers["x-rollgym-ignored"] == "tool_choice"
        assert raw.headers["x-rollgym-call"] == "0"
        if stream:
            async for _ in raw.parse():
                pass
        raw = await one.openai.chat.completions.with_raw_response.create(
            **{**fields, "tool_choice": "auto", "response_format": FORMAT, "stream": False}
        )
        assert raw.headers["x-rollgym-ignored"] == "response_format"
        assert raw.headers["x-rollgym-call"] == "1"
    assert [turn.structured for turn in one.session.trajectory.turns] == [False] * 4
    assert (one.session.counts.calls, one.session.counts.abandoned) == (2, 0)
    assert one.session.model_failure is None


async def test_an_engine_without_the_library_goes_on_without(engine, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    async with talk(engine, **sampling()) as one:
        raw = await one.openai.chat.completions.with_raw_response.create(
            model="policy", messages=[user("Hi")], tools=TOOLS, tool_choice=NAMED, max_tokens=5
        )
        assert raw.headers["x-rollgym-ignored"] == "tool_choice"
        with pytest.raises(openai.BadRequestError, match=r"\[structured\]"):
            await one.say(response_format=FORMAT)


class _Breaking(ScriptedPolicy):
    """Gives a reply up after its first token, wherever it is held to something."""

    async def generate(self, request):
        if request.sampling.structured is None:
            return await super().generate(request)
        if request.on_tokens is not None:
            request.on_tokens(TOKENIZER.encode("<", add_special_tokens=False))
        raise StructuredOutputError("it takes too much to compute")


async def test_a_reply_that_was_handed_over_in_part_is_not_drawn_again():
    async with talk(_Breaking(TOKENIZER, ["Hello", "Hello"])) as one:
        fields = {"model": "policy", "messages": [user("Hi")], "tools": TOOLS, "tool_choice": "required"}
        raw = await one.openai.chat.completions.with_raw_response.create(**fields)
        assert raw.headers["x-rollgym-ignored"] == "tool_choice"
        with pytest.raises(openai.BadRequestError, match="too much to compute"):
            await one.openai.chat.completions.create(**fields, stream=True)


@pytest.mark.parametrize("changes", [{"unstructured": "this run compares them"}, {"wishes": "refuse"}])
async def test_a_run_whose_replies_are_held_to_nothing_names_the_field(changes):
    async with talk(ScriptedPolicy(TOKENIZER, ["Hello", "Hello"]), **changes) as one:
        for fields, named in (
            ({"tool_choice": "required"}, "tool_choice"),
            ({"tool_choice": NAMED, "response_format": FORMAT}, "tool_choice, response_format"),
        ):
            raw = await one.openai.chat.completions.with_raw_response.create(
                model="policy", messages=[user("Hi")], tools=TOOLS, **fields
            )
            assert raw.headers["x-rollgym-ignored"] == named
    assert [request.sampling.structured for request, _ in one.log.calls] == [None, None]


async def test_a_choice_without_tools_is_named():
    async with talk(ScriptedPolicy(TOKENIZER, ["Hello"])) as one:
        raw = await one.openai.chat.completions.with_raw_response.create(
            model="policy", messages=[user("Hi")], tool_choice="required"
        )
        assert raw.headers["x-rollgym-ignored"] == "tool_choice"


ALLOWED = [{"type": "function", "function": {"name": "halt"}}]


@pytest.mark.parametrize(
    ("value", "choice"),
    [
        (None, ToolChoice()),
        ("auto", ToolChoice()),
        ({"type": "auto"}, ToolChoice()),
        ("none", ToolChoice(reads=False)),
        ("any", ToolChoice(must_call=("turn", "halt"))),
        ({"type": "required"}, ToolChoice(must_call=("turn", "halt"))),
        (NAMED, ToolChoice(must_call=("turn",), one=True)),
        ({"type": "function", "name": "halt"}, ToolChoice(must_call=("halt",), one=True)),
        ({"type": "tool", "name": "halt"}, ToolChoice(must_call=("halt",), one=True)),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": ALLOWED * 2}},
            ToolChoice(must_call=("halt",)),
        ),
        ({"type": "allowed_tools", "mode": "auto", "tools": ALLOWED}, ToolChoice(unread=("tool_choice",))),
        ({"type": "allowed_tools", "mode": "auto", "tools": [*ALLOWED, NAMED]}, ToolChoice()),
        ({"type": "web_search"}, ToolChoice(unread=("tool_choice",))),
    ],
)
def test_every_way_of_choosing_is_understood(value, choice):
    assert read_tool_choice(value, TOOLS) == choice


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (5, "must be none, auto, required"),
        (True, "must be none, auto, required"),
        ([], "must be none, auto, required"),
        ("turn", "must be none, auto, required"),
        ({"type": "function"}, "must name a tool"),
        ({"type": "function", "function": 5}, "must name a tool"),
        ({"type": "function", "function": {"name": None}}, "must name a tool"),
        ({"type": "function", "name": "run"}, "names the tool 'run'; tools has 'turn', 'halt'"),
        ({"type": "function", "name": "x" * 1_000_000}, "names the tool"),
        ({"type": "allowed_tools", "mode": "auto", "tools": []}, "need a mode"),
        ({"type": "allowed_tools", "mode": "never", "tools": ALLOWED}, "need a mode"),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"name": "run"}]}, "names the tool 'run'"),
    ],
)
def test_a_choice_that_cannot_be_is_refused(value, said):
    with pytest.raises(ApiError, match=said) as caught:
        read_tool_choice(value, TOOLS)
    assert (caught.value.status, caught.value.param) == (400, "tool_choice")
    assert len(caught.value.message) < 500
