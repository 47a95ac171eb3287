"""The format of BFCL's prompts and Llama 4: a list of Python calls, read as syntax and never run."""

import ast
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

from rollgym.clients.protocol.tool_calls import ToolCall
from rollgym.clients.replies.formats.calls import CallFormat, Reading, Schemas, collect_whole
from rollgym.clients.replies.formats.literals import ExpressionParser, literal_of
from rollgym.clients.replies.json_values import CallFault, without_marks

_FENCES = ("```python", "```tool_code", "```")
_TAG = "<|python_tag|>"
_NAME = re.compile(r"\A\[?\s*[A-Za-z_][\w.]*\s*\(")


def _read(text: str, schemas: Schemas, strict: bool) -> Reading:
    plain = text.strip().removeprefix(_TAG).removesuffix("<|eot_id|>").removesuffix("<|eom_id|>").strip()
    plain = _without_fence(plain)
    if not _NAME.match(plain):
        return Reading(content=plain, remaining=text)
    try:
        items = _expressions(plain)
    except CallFault as fault:
        # Prose such as "f(x) grows" begins like a call; a list of calls is meant as one.
        named = plain.split("(", 1)[0].strip(" [\n\t") in schemas
        meant = named or plain.startswith("[")
        faults = (str(fault),) if meant else ()
        return Reading(content="" if meant else plain, faults=faults, remaining=text)
    return collect_whole(text, "", [partial(_call, item) for item in items])


def _without_fence(text: str) -> str:
    for opening in _FENCES:
        name, line, inner = text.partition("\n")
        if line and name.strip() == opening and inner.endswith("```"):
            return inner.removesuffix("```").strip()
    return text


def _expressions(text: str) -> list[ast.expr]:
    body = ExpressionParser().parse(text)
    return list(body.elts) if isinstance(body, ast.List | ast.Tuple) else [body]


def _call(item: ast.expr) -> ToolCall:
    if not isinstance(item, ast.Call):
        raise CallFault("a list of calls holds nothing but calls, such as tool(parameter='value')")
    name = _dotted(item.func)
    if item.args:
        raise CallFault(f"the arguments of {name} must be given by name, such as {name}(parameter='value')")
    arguments: dict[str, Any] = {}
    for keyword in item.keywords:
        if keyword.arg is None:
            raise CallFault(f"the arguments of {name} must be given by name, and not by **")
        if keyword.arg in arguments:
            raise CallFault(f"{keyword.arg} of {name} is there twice")
        arguments[keyword.arg] = literal_of(keyword.value)
    return ToolCall(name, arguments)


def _dotted(node: ast.expr) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        raise CallFault("a call begins with the name of a tool")
    return ".".join([node.id, *reversed(parts)])


def _write(calls: Sequence[ToolCall], content: str, schemas: Schemas) -> str:
    return f"[{', '.join(_written(call) for call in calls)}]"


def _written(call: ToolCall) -> str:
    arguments = ", ".join(f"{name}={without_marks(repr(value))}" for name, value in call.arguments.items())
    return f"{call.name}({arguments})"


def _explain(schemas: Schemas) -> str:
    return (
        "To call tools, reply with nothing but a list of calls in Python's syntax, with arguments by name, "
        "for example:\n[tool(parameter='value'), other(number=3)]"
    )


PYTHON_CALLS = CallFormat(
    "python",
    _read,
    _write,
    _explain,
    whole=True,
    form="`[tool(parameter='value'), other()]`, parsed as syntax and never run",
    used_by="BFCL's prompts, Llama 4",
)
