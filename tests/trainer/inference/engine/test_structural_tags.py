"""Structural tags in the embedded engine's grammars: what they let through is read as the calls that were wanted."""

import json
import random

import jsonschema
import pytest

from rollgym.clients.replies.formats.calls import json_tag
from rollgym.clients.replies.formats.table import FORMATS
from rollgym.trainer.inference.base import StructuredOutput
from rollgym.trainer.inference.engine.structured import lark_of
from rollgym.trainer.rollout.agents.calls import AgentCall, RequestedSampling
from rollgym.trainer.rollout.agents.policy_service import held_reply
from rollgym.trainer.rollout.agents.replies import read_reply, schemas_of
from rollgym.trainer.rollout.agents.structured import RequiredForm

TEMPLATE_FORMATS = FORMATS.of_templates()

llguidance = pytest.importorskip("llguidance")
ENDS = b"\n</parameter>\n"
FIND = {
    "type": "object",
    "properties": {
        "what": {"type": "string"},
        "most": {"type": "integer", "minimum": 0, "maximum": 99},
        "sure": {"type": "boolean"},
        "order": {"enum": ["up", "down"]},
        "places": {"type": "array", "items": {"$ref": "#/$defs/place"}, "maxItems": 2},
    },
    "required": ["what", "most"],
    "additionalProperties": False,
    "$defs": {"place": {"enum": ["a", "b"]}},
}
TOOLS = [
    {"type": "function", "function": {"name": "find", "parameters": FIND}},
    {"type": "function", "function": {"name": "stop", "parameters": {"type": "object", "properties": {}}}},
    {"type": "function", "function": {"name": "wait"}},
]
ANSWER = RequiredForm(
    StructuredOutput("json", '{"type":"object","properties":{"a":{"type":"string","maxLength":40}}}'), "f"
)


def call(**fields):
    return AgentCall([], tools=TOOLS, reads_tools=True, **fields)


def matcher(wanted):
    grammar = llguidance.grammar_from("lark", lark_of(wanted.output.text))
    made = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar, log_level=0)
    assert not made.is_error(), made.get_error()
    return made


def takes(wanted, text):
    """Whether a reply may be this text and nothing more."""
    made = matcher(wanted)
    data = list(text.encode())
    return made.try_consume_tokens(data) == len(data) and made.is_accepting()


def drawn(wanted, seed, longest=2000):
    """A reply of random bytes that the grammar lets through; None if it comes to no end."""
    made, choice, said = matcher(wanted), random.Random(seed), bytearray()
    for _ in range(longest):
        if made.is_accepting() and choice.random() < 0.5:
            return said.decode(errors="replace")
        mask = made.compute_bitmask()
        allowed = [each for each in range(256) if mask[each // 8] >> (each % 8) & 1]
        if not allowed:
            return said.decode(errors="replace")
        if choice.random() < 0.1:  # texts end at some time, too
            said += ENDS[: made.try_consume_tokens(list(ENDS))]
            continue
        closing = [each for each in allowed if chr(each) in '"}]<\n']
        byte = choice.choice(closing if closing and choice.random() < 0.5 else allowed)
        assert made.consume_token(byte)
        said.append(byte)
    return None


@pytest.mark.parametrize("family", TEMPLATE_FORMATS)
def test_what_a_forced_call_may_be_is_read_as_calls_of_those_tools(family):
    wanted, passed_over = held_reply(call(must_call=("find", "stop")), family)
    assert passed_over == ()
    whole = 0
    for seed in range(40):
        text = drawn(wanted, seed)
        if text is None:
            continue
        whole += 1
        reply = read_reply(text, family, schemas=schemas_of(TOOLS))
        assert reply.calls, text
        assert reply.content.strip() == ""
        for each in reply.calls:
            assert each.name in ("find", "stop")
            jsonschema.validate(
                json.loads(each.arguments), FIND if each.name == "find" else {"maxProperties": 0}
            )
    assert whole >= 20


@pytest.mark.parametrize("family", TEMPLATE_FORMATS)
def test_nothing_but_calls_passes_and_one_where_one_is_wanted(family):
    wanted, _ = held_reply(call(must_call=("stop",), parallel_tools=False), family)
    one = drawn(wanted, 1)
    assert takes(wanted, one)
    for other in ("", "I stop.", f"I stop. {one}", f"{one} So.", f"{one}\n{one}", f"{one}; {one}", one[:-1]):
        assert not takes(wanted, other), other
    several, _ = held_reply(call(must_call=("stop", "wait")), family)
    assert takes(several, one)
    assert any(len(read_reply(drawn(several, seed), family).calls) > 1 for seed in range(12))


@pytest.mark.parametrize("family", ["hermes", "qwen-xml"])
def test_beside_a_form_a_reply_is_calls_or_an_answer(family):
    wanted, passed_over = held_reply(call(wishes=RequestedSampling(structured=ANSWER)), family)
    assert passed_over == ()
    assert takes(wanted, '{"a": "<tool_call>"}')
    assert takes(wanted, drawn(held_reply(call(must_call=("find",)), family)[0], 3))
    assert not takes(wanted, "I stop.")
    assert not takes(wanted, '{"a": 1}')
    for text in ('{"a": "<tool_call>\\n{\\"name\\": \\"stop\\", \\"arguments\\": {}}\\n</tool_call>"}', "{}"):
        assert read_reply(text, family, begins=wanted.begins).content == text
        assert read_reply(text, family, begins=wanted.begins).calls == ()


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_where_calls_begin_as_answers_do_the_form_is_passed_over(family):
    assert held_reply(call(wishes=RequestedSampling(structured=ANSWER)), family) == (None, ("f",))


def test_a_form_that_is_no_schema_is_passed_over_beside_tools():
    regex = RequiredForm(StructuredOutput("regex", "a|b"), "guided_regex")
    assert held_reply(call(wishes=RequestedSampling(structured=regex)), "hermes") == (None, ("guided_regex",))
    wanted, passed_over = held_reply(
        call(wishes=RequestedSampling(structured=regex), must_call=("stop",)), "hermes"
    )
    assert (wanted.spare, passed_over) == (("tool_choice", "guided_regex"), ())


DEEP = {"type": "object", "properties": {"a": json.loads('{"not":' * 80 + "{}" + "}" * 80)}}


@pytest.mark.parametrize(
    "function",
    [
        {"name": "odd", "parameters": {"type": "string"}},
        {"name": "odd", "parameters": DEEP},
        {"name": "odd", "parameters": {"type": "object", "properties": {"a": {"enum": ["x" * 200_000]}}}},
        {"name": "\ud800"},
        {"name": "odd", "parameters": {"type": "object", "properties": {"\ud800": {"type": "integer"}}}},
    ],
)
@pytest.mark.parametrize("family", TEMPLATE_FORMATS)
def test_what_has_no_grammar_is_passed_over(family, function):
    tools = [{"type": "function", "function": function}]
    asked = AgentCall([], tools=tools, reads_tools=True, must_call=(function["name"],))
    assert held_reply(asked, family) == (None, ("tool_choice",))


@pytest.mark.parametrize("name", ['a"b', "a\\b", "ä", "a\nb", "😀", "</tool_call>", "x" * 300])
@pytest.mark.parametrize("family", ["hermes", "llama", "mistral"])
def test_names_are_written_so_that_they_are_read(family, name):
    tools = [{"type": "function", "function": {"name": name}}]
    wanted, _ = held_reply(AgentCall([], tools=tools, reads_tools=True, must_call=(name,)), family)
    assert read_reply(drawn(wanted, 1), family).calls[0].name == name


def test_values_of_qwen_s_text_end_with_the_first_mark_and_numbers_are_numbers():
    wanted, _ = held_reply(call(must_call=("find",), parallel_tools=False), "qwen-xml")
    text = (
        "<tool_call>\n<function=find>\n<parameter=what>\nhalf </parameter> of\nit\n</parameter>\n"
        "<parameter=most>\n7\n</parameter>\n</function>\n</tool_call>"
    )
    assert takes(wanted, text)
    assert not takes(wanted, text.replace("\n7\n", "\nseven\n"))
    assert not takes(wanted, text.replace("<parameter=most>\n7\n</parameter>\n", ""))
    more = "<parameter=order>\nup\n</parameter>\n</function>"
    assert takes(wanted, text.replace("</function>", more))
    assert not takes(wanted, text.replace("</function>", more.replace("up", "left")))


def test_a_schema_that_does_not_say_whether_others_are_allowed_allows_none():
    open_schema = {"properties": {"a": {}}}
    assert json_tag("", open_schema, "")["content"]["json_schema"] == {
        "type": "object",
        "additionalProperties": False,
        "properties": {"a": {}},
    }
    said = {"type": "object", "properties": {}, "additionalProperties": {"type": "integer"}}
    assert json_tag("", said, "")["content"]["json_schema"] == said
    assert json_tag("", {}, "")["content"]["json_schema"] == {"type": "object"}


@pytest.mark.parametrize(
    ("form", "lark"),
    [
        ({"type": "const_string", "value": 'a"\n'}, 'start: "a\\"\\n"'),
        (
            {"type": "json_schema", "json_schema": {"type": "null"}},
            'start: json_0\njson_0: %json {"type": "null"}',
        ),
        (
            {
                "type": "tags_with_separator",
                "tags": [
                    {
                        "type": "tag",
                        "begin": "<",
                        "content": {"type": "any_text"},
                        "end": ">",
                    }
                ],
                "separator": ",",
                "at_least_one": False,
                "stop_after_first": False,
            },
            'start: (call_2 ("," call_2)*)?\nANY_TEXT: /(.|\\n)*/\ntext_1[lazy]: ANY_TEXT ">"\n'
            'call_2: ("<" text_1)',
        ),
    ],
)
def test_formats_are_written_as_lark(form, lark):
    assert lark_of(json.dumps({"type": "structural_tag", "format": form})) == lark


@pytest.mark.parametrize(
    "text",
    [
        "5",
        "{}",
        '{"format": {}}',
        '{"format": {"type": "triggered_tags"}}',
        '{"format": {"type": "tag"}}',
        "{",
    ],
)
def test_what_is_no_structural_tag_is_refused(text):
    with pytest.raises(ValueError, match=r"structural tag|Expecting"):
        lark_of(text)
