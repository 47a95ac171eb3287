"""Sixteen kinds of text that look like structure, held against all that read or write replies.

Environments, verifiers and agents read them by the same pieces of code; SFT, demonstrations and prompts write them."""

import json

import pytest

from rollgym.clients.replies.formats.calls import read_calls
from rollgym.clients.replies.formats.table import FORMATS
from rollgym.clients.replies.marks import boxes, fenced_blocks, last_tagged
from rollgym.clients.replies.thinking import LONGEST, split_thinking, strip_thinking
from rollgym.envs.code.extraction import extract
from rollgym.envs.verifiers.extraction import marked_answer
from rollgym.envs.verifiers.function_calls import FunctionCallsEnv
from rollgym.trainer.learn.pipelines.example_rows import conversation_rows
from rollgym.trainer.rollout.agents.replies import read_reply
from rollgym.trainer.rollout.prompts import ChatRenderer
from rollgym.trainer.tasks.examples import ExampleConversation
from tests.support.chat_templates import FAMILIES as FAMILIES_OF_TEMPLATES
from tests.support.chat_templates import tokenizer_of

TEMPLATE_FORMATS = FORMATS.of_templates()

SCHEMAS = {"put": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}}
TEMPLATES = {
    "hermes": lambda text: (
        f'<tool_call>{{"name": "put", "arguments": {{"text": {quoted(text)}}}}}</tool_call>'
    ),
    "qwen-xml": lambda text: (
        f"<tool_call>\n<function=put>\n<parameter=text>\n{text}\n</parameter>\n</function>\n</tool_call>"
    ),
    "openai": lambda text: (
        f'{{"tool_calls": [{{"function": {{"name": "put", "arguments": {quoted(quoted(text, "text"))}}}}}]}}'
    ),
    "llama": lambda text: f'<|python_tag|>{{"name": "put", "parameters": {{"text": {quoted(text)}}}}}',
    "mistral": lambda text: f'[TOOL_CALLS][{{"name": "put", "arguments": {{"text": {quoted(text)}}}}}]',
    "python": lambda text: f"[put(text={text!r})]",
    "tags": lambda text: f"<put>{text}</put>",
}
"""Calls as models write them, with no mark in them escaped."""


def quoted(text, name=None):
    return json.dumps(text if name is None else {name: text}, ensure_ascii=False)


def called(name, reply):
    """The texts that an environment is called with; None where what was meant as a call is refused."""
    reading = read_calls(reply, FORMATS[name], SCHEMAS)
    return None if reading.faults else [call.arguments["text"] for call in reading.calls]


def agent_called(name, reply, begun=False):
    calls = read_reply(reply, name, begun=begun, schemas=SCHEMAS).calls
    return [json.loads(call.arguments).get("text") for call in calls]


# What is said, by environments and by agents; the answer in tags; the boxes; the program.
TEXTS = {
    "thinking tags in a fence of code": (
        "```python\nprint('<think>a</think>')\n```",
        "```python\nprint('<think>a</think>')\n```",
        None,
        [],
        "print('<think>a</think>')\n",
    ),
    "thinking tags in a JSON string": (
        '{"a": "<think>b</think>"}',
        '{"a": "<think>b</think>"}',
        None,
        [],
        None,
    ),
    "a closing tag in a string": ("print('</think>')", "print('</think>')", None, [], "print('</think>')"),
    "thinking that never closes": ("<think>on and on <answer>4</answer>", "", None, [], None),
    "thinking behind what is said": (
        "a = 4 <think>five</think>",
        "a = 4 <think>five</think>",
        None,
        [],
        "a = 4 <think>five</think>",
    ),
    "thinking in thinking": (
        "<think>a<think>b</think>c</think><answer>4</answer>",
        "<answer>4</answer>",
        "4",
        [],
        None,
    ),
    "answer tags in a fence": (
        "```\n<answer>5</answer>\n```",
        "```\n<answer>5</answer>\n```",
        "5",
        [],
        "<answer>5</answer>\n",
    ),
    "two boxes": (r"\boxed{4} \boxed{5}", r"\boxed{4} \boxed{5}", None, ["4", "5"], None),
    "a box in thinking": (r"<think>\boxed{4}</think>none", "none", None, [], None),
}


@pytest.mark.parametrize(("reply", "said", "answer", "boxed", "program"), TEXTS.values(), ids=TEXTS)
def test_what_every_reader_of_text_reads(reply, said, answer, boxed, program):
    assert strip_thinking(reply) == said
    assert last_tagged(said, "answer") == answer
    assert [box.content for box in boxes(said)[0]] == boxed
    found = extract(reply, "python")
    assert (found.code if found else None) == program
    marked = marked_answer(strip_thinking(reply))
    assert (marked.text if marked else None) == (", ".join(boxed) if boxed else answer)


@pytest.mark.parametrize("text", TEXTS)
def test_what_agents_are_told_is_what_environments_read(text):
    reply, said, *_ = TEXTS[text]
    assert split_thinking(reply, begun=False)[1] == said
    for name in TEMPLATE_FORMATS:
        assert read_reply(reply, name).content == said
        assert read_reply(reply, name).calls == ()


ARGUMENTS = {
    "the closing mark of a call": "close with </tool_call> please",
    "the opening mark of a call": "open with <tool_call> please",
    "the closing marks of parameter and function": "a</parameter>b</function>c",
    "marks of lists": "[TOOL_CALLS] and [ARGS]{} and [CALL_ID]",
    "thinking": "<think>x</think>y",
    "an opening tag": "Use the <think> tag here",
    "null": "null",
    "a number": "123",
    "a truth value": "true",
    "an object": '{"a": 1}',
    "line ends": "\n\ntwo\n\n",
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("text", ARGUMENTS.values(), ids=ARGUMENTS)
def test_an_argument_is_read_as_it_was_said(name, text):
    reply = TEMPLATES[name](text)
    # Blanks around the one text of a tag are no part of it, as in Search-R1.
    expected = text.strip() if name == "tags" else text
    assert called(name, reply) == [expected]
    assert called(name, f"<think>plan</think>{reply}") == [expected]
    assert called(name, f"plan</think>{reply}") == [expected]
    if name in TEMPLATE_FORMATS:
        assert agent_called(name, reply) == [text]
        assert agent_called(name, f"<think>plan</think>{reply}") == [text]
        assert agent_called(name, f"plan</think>{reply}", begun=True) == [text]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_call_in_thinking_is_none_and_one_behind_it_is_one(name):
    call = TEMPLATES[name]("x")
    assert called(name, f"<think>{call}</think>none") == []
    assert called(name, f"<think>{call}</think>{call}") == ["x"]
    if name in TEMPLATE_FORMATS:
        assert agent_called(name, f"<think>{call}</think>none") == []
        assert agent_called(name, f"{call}</think>{call}", begun=True) == ["x"]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_call_in_a_fence_is_read_by_marks_and_by_nothing_else(name):
    """As inference servers have it: a mark is one wherever it stands. For environments, calls are all behind theirs."""
    fenced = f"```\n{TEMPLATES[name]('x')}\n```"
    expected = {"openai": [], "llama": None, "mistral": None}.get(name, ["x"])
    assert called(name, fenced) == expected
    if name in TEMPLATE_FORMATS:
        assert agent_called(name, fenced) == ["x"]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_right_call_pays_whatever_marks_are_in_it(name):
    env = FunctionCallsEnv(call_format=name)
    function = {
        "name": "put",
        "description": "Put a text.",
        "parameters": {"type": "dict", "properties": {"text": {"type": "string"}}, "required": ["text"]},
    }
    for text in ARGUMENTS.values():
        if name == "tags" and text != text.strip():
            continue
        task = {
            "question": "?",
            "functions": [function],
            "accepted": [{"put": {"text": [text]}}],
            "category": "simple",
        }
        assert env.score(TEMPLATES[name](text), task).score == 1.0, text
        assert env.score(TEMPLATES[name]("other"), task).score == 0.0


THINKING_TEMPLATES = ("qwen3", "deepseek")
"""Chat templates that take the thinking of earlier turns away, up to the last closing tag that they see."""
WRITTEN = {**{name: reply for name, (reply, *_) in TEXTS.items()}} | {
    f"a call in {name} with {kind}": write(text)
    for name, write in TEMPLATES.items()
    for kind, text in ARGUMENTS.items()
}


@pytest.mark.parametrize("family", FAMILIES_OF_TEMPLATES)
def test_what_is_learnt_and_what_is_shown_is_the_whole_reply(family):
    tokenizer = tokenizer_of(family)
    renderer = ChatRenderer(tokenizer)
    for name, reply in WRITTEN.items():
        asked = {"role": "user", "content": "Which way?"}
        said = ExampleConversation("row", (asked, {"role": "assistant", "content": reply}))
        (row,) = conversation_rows(renderer, said)
        learnt = tokenizer.decode(row.ids[row.mask], skip_special_tokens=False)
        assert learnt.partition(renderer.token_text(renderer.end_of_turn_id))[0].strip() == reply.strip(), (
            name
        )
        # What a demonstration shows, and an expert's turn.
        assert tokenizer.decode(renderer.reply_ids(reply)[:-1]) == reply, name


@pytest.mark.parametrize("family", THINKING_TEMPLATES)
def test_chat_templates_take_away_what_readers_take_for_thinking_and_nothing_else(family):
    tokenizer = tokenizer_of(family)
    renderer = ChatRenderer(tokenizer)
    for name, reply in WRITTEN.items():
        turns = [
            {"role": "user", "content": "Which way?"},
            {"role": "assistant", "content": reply},
            {"role": "user", "content": "And now?"},
        ]
        shown = tokenizer.decode(renderer.prompt(turns), skip_special_tokens=False)
        expected = TEXTS[name][1] if name in TEXTS else reply
        # What was cut off in its thinking is shown as it is.
        assert (expected or reply).strip("\n") in shown, name
        plain = renderer.prompt([turns[0], {"role": "assistant", "content": "x"}, turns[2]])
        rest = len(tokenizer.decode(plain, skip_special_tokens=False)) - 1
        assert len(shown) - rest <= len(expected or reply), name


LONG = {
    "a megabyte of <": "<" * 1_000_000,
    "a megabyte of opening marks": "<tool_call>" * 90_000,
    "a megabyte of calls that open a string": '<tool_call>{"a' * 70_000,
    "a megabyte of calls in the strings of others": '<tool_call>{"a":"' * 60_000,
    "a megabyte of functions": "<tool_call><function=put><parameter=text>" * 25_000,
    "a megabyte of closing marks": "<tool_call><function=put>" + "</function></tool_call>" * 43_000,
    "a megabyte of names": "[TOOL_CALLS]a[ARGS]" * 50_000,
    "ten thousand brackets": "[" * 10_000,
    "ten thousand brackets in a call": '<tool_call>{"name": "put", "arguments": {"text": ' + "[" * 10_000,
    "a nest of ten thousand": '<tool_call>{"name": "put", "arguments": {"text": '
    + "[" * 10_000
    + "]" * 10_000
    + "}}</tool_call>",
    "a nest of ten thousand without a mark": '{"name": ' + "[" * 10_000 + "]" * 10_000 + "}",
}


@pytest.mark.parametrize("text", LONG.values(), ids=LONG)
def test_no_length_and_no_nest_is_too_much_for_a_reader(text):
    for name in FORMATS:
        assert not called(name, text)
    for name in TEMPLATE_FORMATS:
        assert not any(agent_called(name, text))
    assert strip_thinking(text) == text[-LONGEST:]
    assert fenced_blocks(text) == []
    assert boxes(text) == ([], 0)
