"""Reading tool calls: every format of its own kind, and what holds for all of them."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rollgym.clients.protocol.tool_calls import ToolCall
from rollgym.clients.replies.formats.calls import (
    read_calls,
)
from rollgym.clients.replies.formats.table import FORMATS, format_named

TEXT = {"type": "string"}
SCHEMAS = {
    "search": {"properties": {"query": TEXT, "top_k": {"type": "integer"}}, "required": ["query"]},
    "python": {"properties": {"code": TEXT}, "required": ["code"]},
    "book": {
        "properties": {
            "city": TEXT,
            "nights": {"type": "integer"},
            "price": {"type": "number"},
            "quiet": {"type": "boolean"},
            "tags": {"type": "array"},
            "guest": {"type": "object"},
        },
        "required": ["city", "nights"],
    },
    "now": {"properties": {}},
}
ALL = sorted(FORMATS)
SEARCH = ToolCall("search", {"query": "salt mines"})
BOOK = ToolCall(
    "book",
    {"city": "Oslo", "nights": 2, "price": 9.5, "quiet": True, "tags": ["a", 1], "guest": {"name": "Ada"}},
)


def read(name, reply, limit=16):
    return read_calls(reply, FORMATS[name], SCHEMAS, limit)


def calls(name, reply):
    reading = read(name, reply)
    assert reading.faults == ()
    return [(call.name, dict(call.arguments)) for call in reading.calls]


@pytest.mark.parametrize("name", ALL)
def test_what_is_written_is_read(name):
    written = FORMATS[name].write([SEARCH, BOOK])
    assert calls(name, written) == [(call.name, dict(call.arguments)) for call in (SEARCH, BOOK)]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    "thinking", ["<think>{}</think>", "<THINK>\n{}\n</THINK>", "{}\n</think>", "<think>{}"]
)
def test_calls_in_thinking_are_passed_over(name, thinking):
    thought = thinking.format(FORMATS[name].write([SEARCH]))
    assert read(name, thought).calls == ()
    if thinking.endswith("{}"):
        return
    assert calls(name, thought + FORMATS[name].write([BOOK])) == [("book", dict(BOOK.arguments))]


@pytest.mark.parametrize("name", ALL)
def test_text_alone_is_no_call_and_no_fault(name):
    for text in (
        "",
        "The answer is 4.",
        "<answer>4</answer>",
        "a < b and f(x) = {1, 2} [see above]",
        "[1, 2]",
        "{}",
    ):
        reading = read(name, text)
        assert (reading.calls, reading.faults, reading.content) == ((), (), text)


@pytest.mark.parametrize("name", ALL)
def test_a_reply_holds_so_many_calls_and_no_more(name):
    reading = read(name, FORMATS[name].write([SEARCH] * 3), limit=2)
    assert len(reading.calls) == 2
    assert "at most 2" in reading.faults[0]


@pytest.mark.parametrize("name", ALL)
@given(text=st.text() | st.text(alphabet='<>/|[]{}():,"=\\ \n_aeflnortu1.', max_size=60))
@example(text="[" * 5_000)
@example(text="<tool_call>" + "[" * 200_000)
@example(
    text='{"tool_calls": [null, {"function": {"name": 1}}, {"function": {"name": "a", "arguments": "["}}]}'
)
@example(text="<tool_call><function=><parameter=>")
@example(text="f(x=" + "9" * 5_000 + ")")
@example(text="[f(a=1, a=2)]")
@example(text="f(x=1e999, y=-'a')")
@example(text="[TOOL_CALLS][ARGS][TOOL_CALLS]")
@example(text="<search><search></search>")
@example(text="search(query='\\ud800')")
@settings(max_examples=30)
def test_no_text_raises(name, text):
    form = FORMATS[name]
    for said in (text, f"<tool_call>{text}</tool_call>", f"[TOOL_CALLS]{text}", f"<|python_tag|>{text}"):
        reading = read(name, said)
        assert all(fault for fault in reading.faults)
        for call in reading.calls:
            assert isinstance(call.name, str)
            assert call.name
            form.write([call]).encode()


WORDS = (
    st.text(alphabet="abcxyzäß 0123456789'\"{}[]().,:;!?-+é—", min_size=1, max_size=20)
    .map(str.strip)
    .filter(bool)
)
VALUES = st.fixed_dictionaries(
    {"city": WORDS.filter(lambda text: text.lower() != "null"), "nights": st.integers(-(10**12), 10**12)},
    optional={
        "price": st.floats(-1e6, 1e6),
        "quiet": st.booleans(),
        "tags": st.lists(WORDS | st.integers() | st.none(), max_size=3),
        "guest": st.dictionaries(WORDS, WORDS | st.booleans(), max_size=3),
    },
)


@pytest.mark.parametrize("name", ALL)
@given(arguments=st.lists(VALUES, min_size=1, max_size=3))
@settings(max_examples=25)
def test_arguments_come_back_as_they_were_written(name, arguments):
    said = [ToolCall("book", each) for each in arguments]
    assert calls(name, FORMATS[name].write(said)) == [("book", each) for each in arguments]


@pytest.mark.parametrize("name", ["hermes", "openai", "llama", "mistral"])
@pytest.mark.parametrize(
    "mark",
    [
        "</tool_call>",
        "<tool_call>",
        "</think>",
        "<THINK>",
        "[TOOL_CALLS]",
        "<|python_tag|>",
        '"}}</tool_call>',
    ],
)
def test_marks_in_the_arguments_of_a_call_are_text(name, mark):
    arguments = {"city": f"a{mark}b", "nights": 1}
    written = FORMATS[name].write([ToolCall("book", arguments)])
    assert calls(name, written) == [("book", arguments)]


# -- each format -------------------------------------------------------------------------------------------------------


def test_hermes_takes_arguments_as_text_and_keeps_the_words_around_calls():
    reply = (
        'First a search.\n<tool_call>\n{"name": "search", "arguments": "{\\"query\\": \\"salt\\"}"}\n</tool_call>\n'
        '<tool_call>{"name": "now"}</tool_call> Done.'
    )
    assert calls("hermes", reply) == [("search", {"query": "salt"}), ("now", {})]
    assert read("hermes", reply).content == "First a search.\n\n Done."


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ('{"name": "now", "arguments": {}', "not JSON"),
        ('{"name": "now", "arguments": {"a": 1, "a": 2}}', "twice"),
        ('{"name": "now", "arguments": {"a": NaN}}', "NaN"),
        ('{"name": "now", "arguments": {"a": 1e999}}', "not JSON"),
        ('{"name": "now", "arguments": {"a": "\\ud800"}}', "surrogate"),
        ('{"name": "now", "arguments": [1]}', "object"),
        ('{"arguments": {}}', "no name"),
        ('{"name": "now", "parameters": {}}', "parameters"),
        ("[]", "object"),
        ("", "not JSON"),
    ],
)
def test_json_that_is_not_strict_is_a_fault_and_nothing_is_mended(body, said):
    reading = read("hermes", f"<tool_call>{body}</tool_call>")
    assert reading.calls == ()
    assert said in reading.faults[0]


def test_a_call_that_is_not_closed_is_a_fault_in_hermes_and_a_call_in_qwen_xml():
    reading = read("hermes", '<tool_call>{"name": "now"}')
    assert "not closed" in reading.faults[0]
    cut = "<tool_call>\n<function=search>\n<parameter=query>\nsalt"
    assert calls("qwen-xml", cut) == [("search", {"query": "salt"})]


def test_a_good_call_beside_a_bad_one_is_read():
    reading = read("hermes", '<tool_call>{"name": "now"}</tool_call><tool_call>{]</tool_call>')
    assert [call.name for call in reading.calls] == ["now"]
    assert len(reading.faults) == 1


@pytest.mark.parametrize(
    ("kind", "said", "value"),
    [
        ("object", "{'a': 1}", {"a": 1}),
        (
            "object",
            "{'a': True, 'b': None, 'c': (1, -2.5), 1: 'x'}",
            {"a": True, "b": None, "c": [1, -2.5], "1": "x"},
        ),
        ("object", '{"a": "it\'s"}', {"a": "it's"}),
        ("array", "['a', {'b': [1]}]", ["a", {"b": [1]}]),
        (["object", "null"], "None", None),
        ("boolean", "FALSE", False),
        ("string", "{'a': 1}", "{'a': 1}"),
        # What is neither JSON nor a literal stays text, and is never run.
        ("object", "__import__('os')", "__import__('os')"),
        ("object", "{'a': f(1)}", "{'a': f(1)}"),
        ("object", "{" * 5_000, "{" * 5_000),
        ("array", "['" + "a" * 100_001 + "']", "['" + "a" * 100_001 + "']"),
    ],
)
def test_qwen_xml_takes_literals_of_python_as_its_reference_parser_does(kind, said, value):
    schemas = {"put": {"properties": {"what": {"type": kind}}}}
    reply = f"<tool_call>\n<function=put>\n<parameter=what>\n{said}\n</parameter>\n</function>\n</tool_call>"
    (call,) = read_calls(reply, FORMATS["qwen-xml"], schemas).calls
    assert dict(call.arguments) == {"what": value}


def test_qwen_xml_types_by_the_schema():
    reply = (
        "<tool_call>\n<function=book>\n<parameter=city>\n\n7\n\n</parameter>\n<parameter=nights>\n7\n</parameter>\n"
        "<parameter=quiet>\nTrue\n</parameter>\n<parameter=price>\nnull\n</parameter>\n"
        '<parameter=tags>\n["a", 1]\n</parameter>\n<parameter=guest>\n{"a": 1\n</parameter>\n</function>\n</tool_call>'
    )
    assert calls("qwen-xml", reply) == [
        (
            "book",
            {
                "city": "\n7\n",
                "nights": 7,
                "quiet": True,
                "price": None,
                "tags": ["a", 1],
                "guest": '{"a": 1',
            },
        )
    ]
    twice = (
        "<tool_call><function=now><parameter=a>1</parameter><parameter=a>2</parameter></function></tool_call>"
    )
    assert "twice" in read("qwen-xml", twice).faults[0]
    assert "no <function=" in read("qwen-xml", "<tool_call>now</tool_call>").faults[0]


def test_openai_takes_a_message_a_list_or_one_call():
    call = '{"id": "c7", "type": "function", "function": {"name": "search", "arguments": "{\\"query\\": \\"a\\"}"}}'
    for reply in (f'{{"role": "assistant", "content": "hm", "tool_calls": [{call}]}}', f"[{call}]", call):
        assert calls("openai", reply) == [("search", {"query": "a"})]
        assert read("openai", reply).calls[0].id == "c7"
    assert read("openai", '{"content": "4", "tool_calls": null}').content == "4"
    assert read("openai", '{"tool_calls": [').faults


def test_llama_takes_the_tag_or_bare_objects_and_cuts_them_apart():
    two = '{"name": "now", "parameters": {}}; {"name": "search", "parameters": {"query": "a; b"}}'
    expected = [("now", {}), ("search", {"query": "a; b"})]
    assert calls("llama", f"<|python_tag|>{two}<|eom_id|>") == expected
    assert calls("llama", two) == expected
    assert read("llama", "<|python_tag|>now").faults


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama", '{"name": "search", "parameters": {"query": "<|python_tag|>"}}'),
        ("mistral", '[{"name": "search", "arguments": {"query": "[TOOL_CALLS]"}}]'),
    ],
)
def test_a_mark_in_a_bare_call_is_text(name, text):
    assert calls(name, text) == [("search", {"query": FORMATS[name].mark})]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama", '{"name": "Bob", "age": 5}'),
        ("llama", '{"name": "Bob"}'),
        ("llama", '{"name": "Bob", "age":'),
        ("mistral", '[{"name": "Bob", "age": 5}]'),
        ("openai", '{"function": "x"}'),
    ],
)
def test_an_answer_in_json_that_has_a_name_is_no_call(name, text):
    for strict in (True, False):
        reading = FORMATS[name].read(text, {"search": {}}, strict=strict)
        assert (reading.calls, reading.faults, reading.content) == ((), (), text)


def test_backticks_in_a_line_of_a_program_do_not_end_it():
    tools = {"python": {"properties": {"code": {"type": "string"}}, "required": ["code"]}}
    reading = FORMATS["tags"].read("```python\nprint('```')\n```", tools)
    assert [call.arguments for call in reading.calls] == [{"code": "print('```')"}]


def test_mistral_takes_both_of_its_forms_and_a_list_without_the_mark():
    items = '[{"name": "search", "arguments": {"query": "a"}, "id": "abcdefghi"}]'
    assert calls("mistral", f"Well. [TOOL_CALLS]{items}</s>") == [("search", {"query": "a"})]
    assert calls("mistral", items) == [("search", {"query": "a"})]
    named = '[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]search[CALL_ID]abcdefghi[ARGS]{"query": "a"}'
    assert calls("mistral", named) == [("now", {}), ("search", {"query": "a"})]
    assert read("mistral", named).calls[1].id == "abcdefghi"
    assert read("mistral", "[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]now").faults


def test_an_argument_that_is_there_twice_is_a_fault():
    for name, said in (
        ("python", "[search(query='a', query='b')]"),
        ("hermes", '<tool_call>{"name": "search", "arguments": {"query": "a", "query": "b"}}</tool_call>'),
        (
            "qwen-xml",
            "<tool_call><function=search><parameter=query>a</parameter><parameter=query>b</parameter></function></tool_call>",
        ),
    ):
        reading = read(name, said)
        assert not reading.calls
        assert "twice" in reading.faults[0]


def test_python_calls_are_syntax_and_never_run():
    assert calls("python", "```python\n[a.b.c(x=-1, y=(1, 2), z={'k': None}), now()]\n```") == [
        ("a.b.c", {"x": -1, "y": [1, 2], "z": {"k": None}}),
        ("now", {}),
    ]
    assert calls("python", "<|python_tag|>now()<|eom_id|>") == [("now", {})]
    for bad in (
        "now(1)",
        "now(**{})",
        "now(a=b)",
        "now(a=1 + 1)",
        "now(a=__import__('os'))",
        "[now(), 3]",
        "[now()(",
    ):
        assert read("python", bad).faults, bad


@pytest.mark.parametrize("number", ["0x" + "f" * 4_000, "-0x" + "f" * 4_000, "0b" + "1" * 20_000])
@pytest.mark.parametrize("said", ["{number}", "[{number}]", "{{'a': {number}}}", "{{{number}: 1}}"])
def test_a_whole_number_that_nobody_can_write_is_no_argument(number, said):
    value = said.format(number=number)
    reading = read_calls(f"[store(days={value})]", FORMATS["python"], {"store": {}})
    assert reading.calls == ()
    assert len(reading.faults) == 1
    schemas = {"store": {"properties": {"days": {"type": "integer"}}}}
    reply = f"<tool_call><function=store><parameter=days>{value}</parameter></function></tool_call>"
    (call,) = read_calls(reply, FORMATS["qwen-xml"], schemas).calls
    assert call.arguments == {"days": value}


def test_tags_of_tools_and_fenced_code():
    assert calls("tags", "<search> salt </search> then <now></now>") == [
        ("search", {"query": "salt"}),
        ("now", {}),
    ]
    assert calls("tags", '<search>{"query": "salt", "top_k": 2}</search>') == [
        ("search", {"query": "salt", "top_k": 2})
    ]
    source = "for n in range(2):\n    print(n)"
    for reply in (f"<python>\n{source}\n</python>", f"<code>{source}</code>", f"```python\n{source}\n```"):
        assert calls("tags", reply) == [
            ("python", {"code": source if "```" not in reply else source + "\n"})
        ] or (calls("tags", reply) == [("python", {"code": source})])
    assert "not closed" in read("tags", "<search>salt").faults[0]


def test_an_unknown_format_is_an_error():
    with pytest.raises(ValueError, match="call_format must be one of mistral, qwen-xml, hermes"):
        format_named("xml")


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    "schema",
    [
        {"properties": 5, "required": 7},
        {"properties": {"a": 7}, "required": ["a"]},
        {"properties": None, "required": ["a"]},
        {"properties": {"a": TEXT}, "required": [["a"]]},
        {"properties": {"a": {"type": {"b": 1}}}, "required": {"a": 1}},
    ],
)
def test_a_schema_that_is_none_keeps_no_call_from_being_read(name, schema):
    """Environments declare what they like, and pages send what they like."""
    call = ToolCall("note", {"a": "b"})
    text = FORMATS[name].write([call], schemas={"note": schema})
    (found,) = read_calls(text, FORMATS[name], {"note": schema}).calls
    assert (found.name, found.arguments) == (call.name, call.arguments)
