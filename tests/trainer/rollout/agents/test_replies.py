"""Replies taken apart: thinking, content, calls of tools, in each family's own way of writing them."""

import json
import time

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rollgym.clients.protocol import tool_calls
from rollgym.clients.replies.formats.calls import UnwritableCallError, read_calls
from rollgym.clients.replies.formats.table import FORMATS, written_calls
from rollgym.trainer.rollout.agents.replies import (
    ApiToolCall,
    ParsedReply,
    format_of_template,
    read_reply,
    schemas_of,
)
from rollgym.trainer.rollout.agents.streaming import ReplyStream

TEMPLATE_FORMATS = FORMATS.of_templates()

SCHEMAS = {"add": {"properties": {"a": {"type": "integer"}}}}


def calls(text, tool_format, schemas=SCHEMAS):
    reply = read_reply(text, tool_format, schemas=schemas)
    return [(call.name, json.loads(call.arguments)) for call in reply.calls]


@pytest.mark.parametrize(
    ("tool_format", "text"),
    [
        (
            "hermes",
            '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
            '<tool_call>{"name": "sub", "arguments": {}}</tool_call>',
        ),
        (
            "qwen-xml",
            "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
            "<tool_call><function=sub></function></tool_call>",
        ),
        ("llama", '<|python_tag|>{"name": "add", "parameters": {"a": 1}}; {"name": "sub", "parameters": {}}'),
        ("llama", '{"name": "add", "parameters": {"a": 1}}\n{"name": "sub", "arguments": {}}'),
        ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}, {"name": "sub", "arguments": {}}]'),
        ("mistral", '[{"name": "add", "arguments": {"a": 1}}, {"name": "sub", "arguments": {}}]'),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]sub[CALL_ID]x1[ARGS]{}'),
    ],
)
def test_each_family_writes_calls_in_its_own_way(tool_format, text):
    assert calls(text, tool_format) == [("add", {"a": 1}), ("sub", {})]
    assert read_reply(text, tool_format).content == ""


def test_what_is_said_beside_calls_is_content():
    reply = read_reply('I add.\n<tool_call>{"name": "add", "arguments": {}}</tool_call>', "hermes")
    assert reply == ParsedReply("I add.", None, (ApiToolCall("add", "{}"),))


@pytest.mark.parametrize(
    ("tool_format", "text"),
    [
        ("hermes", "<tool_call>{not json}</tool_call>"),
        ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "arguments": NaN}</tool_call>'),
        ("hermes", "<tool_call>" * 3),
        ("qwen-xml", "<tool_call><function=></tool_call>"),
        ("llama", '{"answer": 42}'),
        ("llama", "{"),
        ("mistral", "[TOOL_CALLS] nothing"),
        ("mistral", "[TOOL_CALLS]add[ARGS]"),
        ("mistral", '[{"answer": 42}]'),
    ],
)
def test_what_is_no_call_stays_content(tool_format, text):
    assert read_reply(text, tool_format) == ParsedReply(text)


def test_no_calls_are_read_where_no_tools_were_offered():
    text = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    assert read_reply(text) == ParsedReply(text)


@pytest.mark.parametrize(
    ("text", "begun", "expected"),
    [
        ("<think>\nhm\n</think>\n\nYes", False, ParsedReply("Yes", "hm")),
        ("hm\n</think>\n\nYes", True, ParsedReply("Yes", "hm")),
        ("<think>cut off", False, ParsedReply("", "cut off")),
        ("cut off", True, ParsedReply("", "cut off")),
        ("Yes</think>", False, ParsedReply("Yes</think>")),
        ("Yes <think>x</think>", False, ParsedReply("Yes <think>x</think>")),
        ("<think></think>Yes", False, ParsedReply("Yes", "")),
    ],
)
def test_thinking_is_kept_apart(text, begun, expected):
    assert read_reply(text, begun=begun) == expected


def test_calls_in_thinking_are_only_thought():
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    assert read_reply(f"<think>{call}</think>no", "hermes") == ParsedReply("no", call)


@pytest.mark.parametrize("tool_format", TEMPLATE_FORMATS)
@pytest.mark.parametrize(
    "unit",
    [
        "<tool_call>",
        "<tool_call><function=a>",
        "<parameter=",
        "[",
        "{",
        "[TOOL_CALLS]",
        "[ARGS]",
        "<think>",
        '{"name":',
    ],
)
def test_a_megabyte_of_one_thing_costs_time_in_proportion(tool_format, unit):
    def seconds(length):
        text = unit * (length // len(unit))
        begin = time.process_time()
        for _ in range(3):
            read_reply(text, tool_format)
        return time.process_time() - begin

    seconds(1000)
    small, large = seconds(250_000), seconds(1_000_000)
    assert large < 0.05 or large < 12 * small


def test_a_nest_of_ten_thousand_is_content():
    text = '<tool_call>{"name": "a", "arguments": ' + '{"a":' * 10_000 + "1" + "}" * 10_001 + "</tool_call>"
    assert read_reply(text, "hermes").calls == ()


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("... <tool_call> ...", "hermes"),
        ("<tool_call><function=", "qwen-xml"),
        ("[TOOL_CALLS]", "mistral"),
        ("<|start_header_id|>", "llama"),
        ("{{ messages }}", "hermes"),
    ],
)
def test_the_family_is_read_off_the_template(template, expected):
    assert format_of_template(template) == expected


# -- what a format writes ----------------------------------------------------------------------------------------------

SAID = [
    *(
        "</tool_call>",
        "<tool_call>",
        "</parameter>",
        "</function>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "<|python_tag|>",
    ),
    *("<think>", "</think>", '"', "\\", "{", "}", "[", "\n", " ", "null", "12", "é", "🙂"),
]
TEXTS = st.lists(st.sampled_from(SAID) | st.text(max_size=4), max_size=6).map("".join)
CALLED_WITH = st.fixed_dictionaries(
    {
        "text": TEXTS,
        "count": st.integers(),
        "deep": st.dictionaries(TEXTS, st.lists(TEXTS | st.none()), max_size=2),
    }
)
PUT = {
    "put": {
        "properties": {"text": {"type": "string"}, "count": {"type": "integer"}, "deep": {"type": "object"}}
    }
}


def written(tool_format, arguments, content):
    try:
        return written_calls(tool_format, [tool_calls.ToolCall("put", arguments)], content, PUT)
    except UnwritableCallError:
        assume(tool_format != "qwen-xml")
        raise


@pytest.mark.parametrize("tool_format", TEMPLATE_FORMATS)
@given(arguments=CALLED_WITH, thought=st.sampled_from([None, "", "I <tool_call> it", "[TOOL_CALLS]"]))
def test_what_a_format_writes_is_what_agents_are_given(tool_format, arguments, thought):
    text = written(tool_format, arguments, "I do.")
    text = text if thought is None else f"<think>\n{thought}\n</think>\n\n{text}"
    reply = read_reply(text, tool_format, schemas=PUT)
    assert (reply.content, reply.reasoning) == ("I do.", thought)
    assert [(call.name, json.loads(call.arguments)) for call in reply.calls] == [("put", arguments)]


@pytest.mark.parametrize("tool_format", TEMPLATE_FORMATS)
@given(
    arguments=CALLED_WITH,
    content=st.sampled_from(["", "I do.", "1 < 2, [a]"]),
    cuts=st.lists(st.integers(0, 400)),
)
def test_what_a_format_writes_is_handed_over_in_any_cuts(tool_format, arguments, content, cuts):
    text = written(tool_format, arguments, content)
    stream = ReplyStream(lambda ids: "".join(map(chr, ids)), frozenset(), (), tool_format, begun=False)
    ids, place, given_over = [ord(each) for each in text], 0, []
    for cut in sorted({*(cut for cut in cuts if cut < len(ids)), len(ids)}):
        given_over += stream.add(ids[place:cut])
        place = cut
    reply = read_reply(text, tool_format, schemas=PUT)
    given_over += stream.end(reply)
    assert "".join(each.text for each in given_over) == reply.content == content
    assert [json.loads(call.arguments) for call in reply.calls] == [arguments]


def test_what_inference_servers_let_pass_is_let_pass():
    open_call = '<tool_call>{"name": "add", "thought": "hm", "parameters": {"a": 1, "a": 2}}'
    assert calls(open_call, "hermes") == [("add", {"a": 2})]
    assert read_calls(open_call, FORMATS["hermes"], {}).calls == ()


def test_schemas_are_those_of_the_tools_that_are_well_formed():
    tools = [
        {"type": "function", "function": {"name": "a", "parameters": {"properties": {}}}},
        {"type": "function", "function": {"name": "b", "parameters": "none"}},
        {"type": "function", "function": {"name": "c"}},
    ]
    assert schemas_of(tools) == {"a": {"properties": {}}}
