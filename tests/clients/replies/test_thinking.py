"""Thinking is what a reply opens with; its tags elsewhere are text."""

import pytest

from rollgym.clients.protocol.tool_calls import ToolCall
from rollgym.clients.replies.formats.calls import read_calls
from rollgym.clients.replies.formats.hermes import HERMES
from rollgym.clients.replies.thinking import has_thought, split_thinking, strip_thinking
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
    "import re\nt=input()\nprint(re.sub(r'</think>','',t))",
    "```python\nimport re\nprint(re.sub(r'</think>','',t))",
    "```python\n# strip </think>\nprint(1)",
    "import re\n# strip </think> here\nprint(1)",
    's = """\n</think>\n"""\nprint(s.strip())',
    '[f(a="""x\n</think>\ny""")]',
    "[f(a=rb'</think>')]",
    "<python>\n# strip </think> here\n</python>",
    "<search>what does </think> mean</search>",
    "<f></think></f>",
    "<answer></think></answer>",
    "1. ok\n     ```python\n     x </think>\n     ```",
    "- ```\n  </think>\n  ```",
    "> ```\n> </think>\n> ```",
    "> ```\n> </think>",
    "Write ``</think>`` there.",
    "“</think>” is a tag.",
    r"\boxed{</think>}",
]


@pytest.mark.parametrize("reply", WHOLE)
def test_a_tag_in_code_in_quotation_marks_and_in_a_call_is_text(reply):
    assert strip_thinking(reply) == reply
    assert strip_thinking(f"<think>plan</think>{reply}") == reply
    assert not has_thought(reply)
    # The opening tag may stand in the prompt.
    assert has_thought(f"plan\n</think>{reply}")
    assert strip_thinking(f"plan\n</think>{reply}") == reply


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        ("<think>plan</think>Up", "Up"),
        ("plan</think>Up", "Up"),
        (
            "<think>plan</think>It is 5. The tag </think> ends thinking.",
            "It is 5. The tag </think> ends thinking.",
        ),
        ('<think>The string "</think>" is a tag.</think>Up', "Up"),
        ('<think>He said "</think>Up', "Up"),
        ("so f'(x) = 2x</think>The derivative is f'(x) = 2x", "The derivative is f'(x) = 2x"),
        ("I write <answer> tags</think><answer>5</answer>", "<answer>5</answer>"),
        ("```python\nx = 1\n</think>\nUp", "\nUp"),
        ('<think>a <tool_call>{"a":"</think>"}</tool_call></think>Up', "Up"),
        ("# Plan\nright</think>Up", "Up"),
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


@pytest.mark.parametrize(
    ("reply", "thought", "said"),
    [
        ('<think>The string "</think>" is a tag.</think>Up', 'The string "</think>" is a tag.', "Up"),
        (
            '<think>a <tool_call>{"a":"</think>"}</tool_call></think>Up',
            'a <tool_call>{"a":"</think>"}</tool_call>',
            "Up",
        ),
        ("<thinking>p</thinking>x", "p", "x"),
        ("<think>a<think>b</think>c</think>d", "a<think>b</think>c", "d"),
        ("<think>a</think>\n<think>b</think>d", "a</think>\n<think>b", "d"),
    ],
)
def test_agents_and_environments_read_the_same_thinking(reply, thought, said):
    assert split_thinking(reply, begun=False) == split_thinking(reply, begun=True) == (thought, said)
    assert strip_thinking(reply) == said


@pytest.mark.parametrize(
    "unit", ["'</think>\n", "```a\n</think>\n", '"</think>', "<think><think></think>", "</think> a "]
)
def test_many_tags_are_read(unit):
    reply = unit * (100_000 // len(unit))
    assert reply.endswith(strip_thinking(reply))
    assert reply.endswith(split_thinking(reply, begun=True)[1])
