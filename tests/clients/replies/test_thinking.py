"""Thinking is what a reply opens with; its tags elsewhere are text."""

import pytest

from rollgym.clients.protocol.tool_calls import ToolCall
from rollgym.clients.replies.formats.calls import read_calls
from rollgym.clients.replies.formats.hermes import HERMES
from rollgym.clients.replies.thinking import strip_thinking
from rollgym.envs.code.extraction import extract

WHOLE = [
    "```python\nprint('</think>')\n```",
    "```python\nprint(re.sub(r'<think>.*?</think>', '', t))\n```",
    "print('</think>')",
    "print('<think>')",
    '<tool_call>\n{"name": "a", "arguments": {"t": "<think>x</think>y"}}\n</tool_call>',
    'Use the <think> tag here <tool_call>{"name": "a", "arguments": {}}</tool_call>',
    '{"name": "a", "parameters": {"t": "</think>"}}',
    "[f(x='</think>')]",
    'He said "</think>" and left.',
]


@pytest.mark.parametrize("reply", WHOLE)
def test_a_tag_in_code_in_quotation_marks_and_in_a_call_is_text(reply):
    assert strip_thinking(reply) == reply
    assert strip_thinking(f"<think>plan</think>{reply}") == reply
    # The opening tag may stand in the prompt.
    assert strip_thinking(f"plan\n</think>{reply}") == reply


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        ("<think>plan</think>Up", "Up"),
        ("plan</think>Up", "Up"),
        (" \n<Thinking>plan</THINKING> Up", " Up"),
        ("<think>cut off", ""),
        ("<think>one</think><think>two</think>Up", "Up"),
        ("<think>one <think>two</think> three</think>Up", "Up"),
        ("I don't know</think>It's Up", "It's Up"),
        ("code\n```python\nx = 1\n``` and more</think>Up", "Up"),
        ("maybe <function=a></function></think><function=b></function>", "<function=b></function>"),
        (
            "so <tool_call><function=a></function></tool_call></think><tool_call><function=b></function></tool_call>",
            "<tool_call><function=b></function></tool_call>",
        ),
        ("maybe <tool_call>{...}</tool_call></think><tool_call>{}</tool_call>", "<tool_call>{}</tool_call>"),
        ("I'd call <tool_call> now</think><tool_call>{}</tool_call>", "<tool_call>{}</tool_call>"),
    ],
)
def test_what_was_thought_is_not_said(reply, said):
    assert strip_thinking(reply) == said


def test_a_program_and_an_argument_keep_their_tags():
    program = "import re\nprint(re.sub(r'<think>.*?</think>', '', input()))\n"
    assert extract(f"<think>plan</think>\n```python\n{program}```", "python").code == program
    for text in ("<think>x</think>y", "Use the <think> tag here", "</think>"):
        call = ToolCall("note", {"text": text})
        assert read_calls(HERMES.write([call]), HERMES, {}).calls == (call,)
        plain = f'<tool_call>{{"name": "note", "arguments": {{"text": "{text}"}}}}</tool_call>'
        assert read_calls(plain, HERMES, {}).calls == (call,)
