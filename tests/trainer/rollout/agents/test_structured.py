"""What agents say that replies must look like, by the libraries of OpenAI and Anthropic, against a real engine."""

import json

import httpx
import openai
import pytest

from rollgym.trainer.inference.base import StructuredOutput
from rollgym.trainer.records.trajectory import Trajectory
from rollgym.trainer.rollout.agents.errors import ApiError
from rollgym.trainer.rollout.agents.structured import wanted_output
from tests.support.agent_policy import (
    ScriptedPolicy,
    endpoint_of,
    service_of,
    tool_tokenizer,
)
from tests.support.agent_talk import TOOLS, user
from tests.support.structured_talk import FORMAT, SCHEMA, TOKENIZER, Move, Talk, sampling, talk


@pytest.mark.parametrize("wishes", ["run", "agent"])
async def test_replies_fit_in_every_api_as_streams_too(engine, wishes):
    async with talk(engine, wishes=wishes, **sampling()) as one:
        got = await one.openai.chat.completions.parse(
            model="policy", messages=[user("Where to?")], response_format=Move
        )
        assert got.choices[0].message.parsed.move in ("Left", "Right")
        async with one.openai.chat.completions.stream(
            model="policy", messages=[user("Where to?")], response_format=Move
        ) as stream:
            async for _ in stream:
                pass
            assert isinstance((await stream.get_final_completion()).choices[0].message.parsed, Move)
        response = await one.openai.responses.parse(model="policy", input="Where to?", text_format=Move)
        assert isinstance(response.output_parsed, Move)
        assert response.text.format.schema_["properties"].keys() == {"move", "sure"}
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
            {"regex": "Left|Right"},
            {"ebnf": 'root ::= "Left" | "Right"'},
        ):
            got = await one.say(extra_body=fields, n=2)
            assert {each.message.content for each in got.choices} <= {"Left", "Right"}
    turns = one.session.trajectory.turns
    assert all(turn.structured for turn in turns)
    again = Trajectory.from_record(json.loads(json.dumps(one.session.trajectory.as_record())))
    assert again.turns == turns


async def test_what_cannot_be_had_is_a_bad_request_and_no_fault_of_the_run(engine):
    async with talk(engine, **sampling()) as one:
        for schema, said in (
            ({"type": 5}, "type must be"),
            ({"not": {}}, "Unimplemented"),
            ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ):
            with pytest.raises(openai.BadRequestError, match=said) as caught:
                await one.say(
                    response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
                )
            assert (caught.value.code, caught.value.param) == ("structured_output_refused", "response_format")
        with pytest.raises(openai.BadRequestError, match="type must be"):
            await one.say(extra_body={"guided_json": {"type": 5}}, stream=True)
        assert (await one.say(max_tokens=3)).choices
    assert one.session.model_failure is None
    assert len(one.session.trajectory.turns) == 1


async def test_where_calls_begin_as_answers_do_tools_leave_no_room_for_a_format_which_is_named():
    policy = ScriptedPolicy(TOKENIZER, ["Left", "Left"])
    async with talk(policy, tool_format="llama") as one:
        got = await one.openai.chat.completions.with_raw_response.create(
            model="policy", messages=[user("Hi")], tools=TOOLS, response_format=FORMAT
        )
        assert got.headers["x-rollgym-ignored"] == "response_format"
        got = await one.openai.chat.completions.with_raw_response.create(
            model="policy", messages=[user("Hi")], tools=TOOLS, tool_choice="none", response_format=FORMAT
        )
        assert "x-rollgym-ignored" not in got.headers
    first, second = [request.sampling.structured for request, _ in one.log.calls]
    assert first is None
    assert json.loads(second.text) == SCHEMA
    assert [turn.structured for turn in one.session.trajectory.turns] == [False, True]


async def test_a_run_that_compares_log_probabilities_at_sampling_refuses():
    policy = ScriptedPolicy(TOKENIZER, [])
    async with talk(policy, unstructured="this run compares them: take 'recomputed'") as one:
        with pytest.raises(openai.BadRequestError, match="response_format: this run compares them: take"):
            await one.say(response_format=FORMAT)
    async with talk(ScriptedPolicy(TOKENIZER, []), wishes="refuse") as one:
        with pytest.raises(
            openai.BadRequestError, match="response_format: how replies are sampled is the run's"
        ):
            await one.say(response_format=FORMAT)


@pytest.mark.parametrize(
    ("said", "thought"),
    [('{"a": 1}', None), ("hm\n</think>\n\n{}", "hm"), ('{"a": "ends with </think> here"}', None)],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_format_holds_from_the_first_token_where_a_template_opens_the_thinking(said, thought, stream):
    tokenizer = tool_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "<|im_start|>assistant{{ '\n' }}{%- endif -%}",
        "<|im_start|>assistant{{ '\n<think>\n' }}{%- endif -%}",
    )
    policy = ScriptedPolicy(tokenizer, [said])
    async with endpoint_of(service_of(policy, tokenizer)) as endpoint:
        one = Talk(endpoint, policy)
        if stream:
            content, reasoning = "", None
            async for chunk in await one.say(response_format={"type": "json_object"}, stream=True):
                delta = chunk.choices[0].delta
                content += delta.content or ""
                if getattr(delta, "reasoning_content", None) is not None:
                    reasoning = (reasoning or "") + delta.reasoning_content
        else:
            message = (await one.say(response_format={"type": "json_object"})).choices[0].message
            content, reasoning = message.content, getattr(message, "reasoning_content", None)
        assert (json.loads(content), reasoning) == (json.loads(said.rpartition("\n")[2]), thought)
        await one.openai.close()
        await one.anthropic.close()


DEEP = json.loads('{"not":' * 70 + "{}" + "}" * 70)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": 5}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": 5}},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": 1}}},
            "response_format.json_schema.strict",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "name": 1}}},
            "response_format.json_schema.name",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": DEEP}}},
            "response_format.json_schema.schema",
        ),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "[" * 10_000}, "guided_json"),
        ({"guided_json": 1.5}, "guided_json"),
        ({"guided_json": {"enum": ["x" * 1_000_000]}}, "guided_json"),
        ({"guided_json": DEEP}, "guided_json"),
        ({"guided_json": {"const": "\ud800"}}, "guided_json"),
        ({"guided_regex": "x" * 1_000_000}, "guided_regex"),
        ({"guided_regex": 5}, "guided_regex"),
        ({"guided_regex": "a\0b"}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", ""]}, "guided_choice"),
        ({"guided_choice": ["a"] * 1001}, "guided_choice"),
        ({"guided_choice": ["\ud800"]}, "guided_choice"),
        ({"guided_grammar": " "}, "guided_grammar"),
        ({"structural_tag": "x"}, "structural_tag"),
        ({"structured_outputs": []}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"choice": [5]}}, "structured_outputs.choice"),
        ({"response_format": {"type": "json_object"}, "regex": "a"}, "regex"),
        ({"ebnf": "a", "regex": "a"}, "regex"),
    ],
)
def test_what_is_malformed_too_large_or_said_twice_is_refused_by_name(fields, param):
    with pytest.raises(ApiError) as caught:
        wanted_output(fields, fields.get("response_format"), "response_format")
    assert (caught.value.status, caught.value.param) == (400, param) or "only one" in caught.value.message


@pytest.mark.parametrize(
    ("fields", "output"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"regex": "", "structured_outputs": None}, None),
        ({"response_format": {"type": "json_object"}}, StructuredOutput("json", '{"type": "object"}')),
        ({"structured_outputs": {"json_object": True}}, StructuredOutput("json", '{"type": "object"}')),
        ({"guided_json": '{"type": "null"}'}, StructuredOutput("json", '{"type":"null"}')),
        ({"json_schema": {"b": 1, "a": "ü"}}, StructuredOutput("json", '{"b":1,"a":"ü"}')),
        (
            {"json_schema": {"$id": "Output Format", "type": "null"}},
            StructuredOutput("json", '{"type":"null"}'),
        ),
        ({"json_schema": {"$id": "http://a/b#"}}, StructuredOutput("json", '{"$id":"http://a/b#"}')),
        ({"json_schema": {"$id": 5}}, StructuredOutput("json", '{"$id":5}')),
        ({"guided_choice": ["a.b", "(c)"]}, StructuredOutput("regex", r"a\.b|\(c\)")),
        ({"guided_grammar": "start: x"}, StructuredOutput("grammar", "start: x")),
    ],
)
def test_every_way_of_asking_is_one_of_three(fields, output):
    wanted = wanted_output(fields, fields.get("response_format"), "response_format")
    assert (None if wanted is None else wanted.output) == output


async def test_a_nest_of_brackets_is_refused_with_the_body():
    async with talk(ScriptedPolicy(TOKENIZER, [])) as one, httpx.AsyncClient() as http:
        nest = '{"a":' * 10_000 + "1" + "}" * 10_000
        body = f'{{"messages": [{{"role": "user", "content": "x"}}], "guided_json": {nest}}}'
        answer = await http.post(f"{one.url}/v1/chat/completions", content=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")
