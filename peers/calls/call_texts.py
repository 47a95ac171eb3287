"""Replies with calls of tools, in the formats of five families: what models write, and what they get wrong.

Nothing but the standard library is imported, so that the process of a peer can read them as well.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

TOOLS: dict[str, dict[str, Any]] = {
    "put": {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "count": {"type": "integer"},
            "share": {"type": "number"},
            "open": {"type": "boolean"},
            "where": {"type": "object"},
            "names": {"type": "array"},
        },
    },
    "look": {"type": "object", "properties": {}},
}
"""The schemas of the parameters of what is offered."""

ARGUMENTS: dict[str, dict[str, Any]] = {
    "a word": {"text": "word"},
    "no text": {"text": ""},
    "blanks": {"text": "  two  "},
    "lines": {"text": "one\ntwo\n\nthree"},
    "quotation marks": {"text": "say \"hi\" and 'ho'"},
    "backslashes": {"text": "C:\\new\\table"},
    "letters of others": {"text": "é漢🙂\u2028"},
    "an entity": {"text": "a &lt; b &amp; c"},
    "a number as text": {"text": "123"},
    "a truth value as text": {"text": "true"},
    "null as text": {"text": "null"},
    "an object as text": {"text": '{"a": 1}'},
    "a program": {"text": "def f(x):\n    return {'a': x}  # done"},
    "tags of thinking": {"text": "<think>a</think>b"},
    "a tag of an element": {"text": "<b>bold</b>"},
    "brackets": {"text": "[1], {2}, (3); [x(y=1)]"},
    "a fence": {"text": "```\ncode\n```"},
    "the closing mark of hermes": {"text": "a</tool_call>b"},
    "the opening mark of hermes": {"text": "a<tool_call>b"},
    "the closing mark of a parameter": {"text": "a</parameter>b"},
    "the closing mark of a function": {"text": "a</function>b"},
    "the mark of mistral": {"text": "a[TOOL_CALLS]b"},
    "the mark of llama": {"text": "a<|python_tag|>b"},
    "a whole number": {"count": 5},
    "a large number": {"count": 2**70},
    "a negative number": {"count": -5},
    "a fraction": {"share": 0.5},
    "an exponent": {"share": 1e-7},
    "a truth value": {"open": True},
    "an object": {"where": {"city": "Oslo", "at": [1, {"b": None}]}},
    "a list": {"names": ["a", "b, c", 3, None, True]},
    "empty ones": {"where": {}, "names": []},
    "several": {"text": "x", "count": 2, "open": False},
    "none": {},
}
FAMILIES = ("hermes", "qwen-xml", "llama", "mistral", "mistral-named", "python")
"""Mistral's models write lists of calls, and since the eleventh tokenizer each call behind a mark and its name."""


@dataclass(frozen=True)
class Text:
    """A reply.

    Attributes:
        family: Whose format it is in.
        name: What is special about it.
        text: All of it.
    """

    family: str
    name: str
    text: str


def texts() -> Iterator[Text]:
    """Yield all replies."""
    for family in FAMILIES:
        for name, arguments in ARGUMENTS.items():
            yield Text(family, f"put with {name}", marked(family, call(family, "put", arguments)))
        yield from (Text(family, name, text) for name, text in _dressings(family))
        yield from (Text(family, name, text) for name, text in _FAULTY[family].items())


def call(family: str, name: str, arguments: dict[str, Any]) -> str:
    """Return a call as a model of a family writes it."""
    written = json.dumps(arguments, ensure_ascii=False)
    if family == "hermes":
        return f'<tool_call>\n{{"name": "{name}", "arguments": {written}}}\n</tool_call>'
    if family == "qwen-xml":
        lines = [
            line
            for key, value in arguments.items()
            for line in (
                f"<parameter={key}>",
                value if isinstance(value, str) else json.dumps(value, ensure_ascii=False),
                "</parameter>",
            )
        ]
        return "\n".join(["<tool_call>", f"<function={name}>", *lines, "</function>", "</tool_call>"])
    if family == "python":
        return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
    if family == "mistral-named":
        return f"[TOOL_CALLS]{name}[ARGS]{written}"
    key = "parameters" if family == "llama" else "arguments"
    return f'{{"name": "{name}", "{key}": {written}}}'


def marked(family: str, *calls: str) -> str:
    """Return calls with what stands around all of them."""
    if family == "mistral":
        return f"[TOOL_CALLS][{', '.join(calls)}]"
    if family == "llama":
        return "; ".join(calls)
    if family == "mistral-named":
        return "".join(calls)
    return f"[{', '.join(calls)}]" if family == "python" else "\n".join(calls)


def _dressings(family: str) -> Iterator[tuple[str, str]]:
    put, look = call(family, "put", {"text": "x"}), call(family, "look", {})
    one = marked(family, put)
    yield "two calls", marked(family, put, look)
    yield "the same call twice", marked(family, put, put)
    yield "text before", f"I will put it there.\n{one}"
    yield "text behind", f"{one}\nDone."
    yield "blanks around", f"\n\n{one}\n\n"
    yield "in a fence", f"```\n{one}\n```"
    yield "of no tool that is offered", marked(family, call(family, "drop", {"table": "all"}))
    yield "text alone", "Nothing is to be done."
    yield "nothing", ""
    yield "braces in what is said", "The set {1, 2} is [1, 2]."
    yield "an answer in JSON", '{"city": "Oslo", "people": 5}'
    yield "an answer in JSON with a name", '{"name": "Bob", "age": 5}'
    yield "cut off", one[: len(one) * 2 // 3]
    yield "cut off before its last mark", one.rpartition("</tool_call>")[0] or one[:-1]


def _json_faults(begin: str, key: str, end: str) -> dict[str, str]:
    def with_arguments(written: str) -> str:
        return f'{begin}{{"name": "put", "{key}": {written}}}{end}'

    return {
        "arguments as JSON text": with_arguments('"{\\"text\\": \\"x\\"}"'),
        "arguments that are a list": with_arguments("[1]"),
        "arguments that are null": with_arguments("null"),
        "a comma too many": with_arguments('{"text": "x",}'),
        "single quotation marks": f"{begin}{{'name': 'put', '{key}': {{'text': 'x'}}}}{end}",
        "NaN": with_arguments('{"share": NaN}'),
        "a number beyond all bounds": with_arguments('{"share": 1e999}'),
        "a name that is there twice": with_arguments('{"text": "x", "text": "y"}'),
        "a line end in a text": with_arguments('{"text": "x\ny"}'),
        "no arguments": f'{begin}{{"name": "put"}}{end}',
        "no name": f'{begin}{{"{key}": {{"text": "x"}}}}{end}',
        "a further key": f'{begin}{{"name": "put", "{key}": {{"text": "x"}}, "why": "so"}}{end}',
        "the other word for arguments": (
            f'{begin}{{"name": "put", "{"arguments" if key == "parameters" else "parameters"}": {{"text": "x"}}}}{end}'
        ),
        "an id": f'{begin}{{"name": "put", "{key}": {{"text": "x"}}, "id": "abcdefghi"}}{end}',
        "half a character": with_arguments('{"text": "\\ud800"}'),
        "escapes": with_arguments('{"text": "\\u003cb\\u003e \\ud83d\\ude42"}'),
        "no JSON": f"{begin}put{end}",
    }


def _xml(*lines: str) -> str:
    return "\n".join(["<tool_call>", *lines, "</tool_call>"])


_FAULTY: dict[str, dict[str, str]] = {
    "hermes": _json_faults("<tool_call>\n", "arguments", "\n</tool_call>")
    | {
        "a bad call beside a good one": (
            '<tool_call>{"name": "put", "arguments": {"text": "x"}}</tool_call>'
            '<tool_call>{"name": "look", "arguments": {</tool_call>'
        ),
        "the closing mark alone": 'x {"name": "look", "arguments": {}}</tool_call>',
        "text between two calls": (
            '<tool_call>{"name": "look", "arguments": {}}</tool_call> and '
            '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
        ),
    },
    "llama": _json_faults("", "parameters", "")
    | {
        "the mark before it": '<|python_tag|>{"name": "put", "parameters": {"text": "x"}}',
        "the mark before two": '<|python_tag|>{"name": "look", "parameters": {}}; {"name": "look", "parameters": {}}',
        "two without a semicolon": '{"name": "look", "parameters": {}}\n{"name": "look", "parameters": {}}',
        "a type": '{"type": "function", "name": "look", "parameters": {}}',
    },
    "mistral": _json_faults("[TOOL_CALLS][", "arguments", "]")
    | {
        "an object without a list": '[TOOL_CALLS]{"name": "look", "arguments": {}}',
        "a list without the mark": '[{"name": "put", "arguments": {"text": "x"}}]',
        "text behind the list": '[TOOL_CALLS][{"name": "look", "arguments": {}}] so',
    },
    "mistral-named": {
        "an id": '[TOOL_CALLS]put[CALL_ID]abcdefghi[ARGS]{"text": "x"}',
        "no second mark": '[TOOL_CALLS]put{"text": "x"}',
        "no second mark, twice": '[TOOL_CALLS]put{"text": "x"}[TOOL_CALLS]look{}',
        "no first mark": 'put[ARGS]{"text": "x"}',
        "arguments that are a list": "[TOOL_CALLS]put[ARGS][1]",
        "no arguments": "[TOOL_CALLS]put[ARGS]",
        "a comma too many": '[TOOL_CALLS]put[ARGS]{"text": "x",}',
        "NaN": '[TOOL_CALLS]put[ARGS]{"share": NaN}',
        "a name that is there twice": '[TOOL_CALLS]put[ARGS]{"text": "x", "text": "y"}',
        "blanks": '[TOOL_CALLS] put [ARGS] {"text": "x"}',
    },
    "qwen-xml": {
        "no tool_call": "<function=put>\n<parameter=text>\nx\n</parameter>\n</function>",
        "no closing mark of the function": _xml("<function=put>", "<parameter=text>", "x", "</parameter>"),
        "no closing mark of a parameter": _xml(
            "<function=put>", "<parameter=text>", "x", "<parameter=count>", "5", "</parameter>", "</function>"
        ),
        "all in one line": "<tool_call><function=put><parameter=text>x</parameter></function></tool_call>",
        "a number that is none": _xml(
            "<function=put>", "<parameter=count>", "five", "</parameter>", "</function>"
        ),
        "a truth value that is none": _xml(
            "<function=put>", "<parameter=open>", "yes", "</parameter>", "</function>"
        ),
        "a truth value of Python": _xml(
            "<function=put>", "<parameter=open>", "True", "</parameter>", "</function>"
        ),
        "null for a number": _xml(
            "<function=put>", "<parameter=count>", "null", "</parameter>", "</function>"
        ),
        "an object of Python": _xml(
            "<function=put>", "<parameter=where>", "{'a': True}", "</parameter>", "</function>"
        ),
        "a fraction for a whole number": _xml(
            "<function=put>", "<parameter=count>", "5.0", "</parameter>", "</function>"
        ),
        "a parameter that nobody knows": _xml(
            "<function=put>", "<parameter=other>", "5", "</parameter>", "</function>"
        ),
        "a parameter that is there twice": _xml(
            "<function=put>",
            *("<parameter=text>", "x", "</parameter>", "<parameter=text>", "y", "</parameter>"),
            "</function>",
        ),
        "JSON in it": _xml('{"name": "put", "arguments": {"text": "x"}}'),
        "blanks around values": _xml(
            "<function=put>", "<parameter=text>", "  x  ", "</parameter>", "</function>"
        ),
        "blanks in names": _xml("<function= put >", "<parameter= text >", "x", "</parameter>", "</function>"),
        "no name": _xml("<function=>", "<parameter=text>", "x", "</parameter>", "</function>"),
    },
    "python": {
        "no brackets": "put(text='x')",
        "an argument without a name": "[put('x')]",
        "keywords of JSON": "[put(open=true, text=null)]",
        "a sum": "[put(count=1 + 1)]",
        "a negative number": "[put(count=-3)]",
        "a name for a value": "[put(text=x)]",
        "a call for a value": "[put(text=look())]",
        "a dotted name": "[a.put(text='x')]",
        "a tuple": "[put(names=(1, 2))]",
        "a set": "[put(names={1, 2})]",
        "a name that is there twice": "[put(text='x', text='y')]",
        "an empty list": "[]",
        "a list of numbers": "[1, 2]",
        "several lines": "[\n    put(text='x'),\n    look(),\n]",
        "a text of several lines": '[put(text="""one\ntwo""")]',
        "texts side by side": "[put(text='a' 'b')]",
        "a formatted text": "[put(text=f'{1}')]",
        "bytes": "[put(text=b'x')]",
        "more than a list": "[look()][0]",
        "the mark before it": "<|python_tag|>[put(text='x')]",
    },
}

REPLIES: dict[str, str] = {
    "thinking": "plan</think>\n\nUp",
    "both tags": "<think>\nplan\n</think>\n\nUp",
    "nothing thought": "<think>\n\n</think>\n\nUp",
    "nothing said": "<think>\nplan\n</think>",
    "cut off": "<think>\nplan",
    "cut off, opened by the prompt": "plan",
    "no blanks": "<think>plan</think>Up",
    "lines": "<think>\none\n\ntwo\n</think>\nUp\nthen",
    "a call behind it": "<think>\nplan\n</think>\n\n<tool_call>\n{}\n</tool_call>",
    "a call in it": "<think>a <tool_call>{}</tool_call> b</think>Up",
    "thinking twice": "<think>one</think><think>two</think>Up",
    "thinking in thinking": "<think>one <think>two</think> three</think>Up",
    "a closing tag in quotation marks": '<think>The string "</think>" is a tag.</think>Up',
    "a closing tag in a fence": "<think>\n```\n</think>\n```\n</think>Up",
    "a closing tag as a word": "<think>plan</think>The tag </think> ends thinking.",
    "a program that prints it": "<think>plan</think>\n```python\nprint('</think>')\n```",
    "thinking behind what is said": "<think>plan</think>Up <think>more</think> then",
    "other tags": "<thinking>plan</thinking>Up",
    "capital letters": "<THINK>plan</THINK>Up",
    "an answer": "<think>2 + 2</think><answer>4</answer>",
}
"""Replies that think, to prompts that have opened the thinking."""
