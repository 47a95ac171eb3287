"""The format of BFCL's prompts and Llama 4: a list of Python calls, read as syntax and never run."""

import ast
import math
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from envs.tools.calls import CallFault, CallFormat, Reading, Schemas, ToolCall, collect, shown

_FENCE = re.compile(r"\A```(?:python|tool_code)?\s*\n(.*?)\n?```\Z", re.DOTALL)
_TAG = "<|python_tag|>"
_NAME = re.compile(r"\A\[?\s*[A-Za-z_][\w.]*\s*\(")
_LONGEST = 100_000
_DEEPEST = 50


def _read(text: str, schemas: Schemas) -> Reading:
    plain = text.strip().removeprefix(_TAG).removesuffix("<|eot_id|>").removesuffix("<|eom_id|>").strip()
    if (fenced := _FENCE.match(plain)) is not None:
        plain = fenced[1].strip()
    if not _NAME.match(plain):
        return Reading(content=plain)
    try:
        items = _expressions(plain)
    except CallFault as fault:
        # Prose such as "f(x) grows" begins like a call; a list of calls is meant as one.
        named = plain.split("(", 1)[0].strip(" [\n\t") in schemas
        return Reading(faults=(str(fault),)) if named or plain.startswith("[") else Reading(content=plain)
    return collect([_reader(item) for item in items], "")


def _expressions(text: str) -> list[ast.expr]:
    if len(text) > _LONGEST:
        raise CallFault(f"the calls have over {_LONGEST} characters")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            body = ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise CallFault(f"{shown(text)} is not a list of calls: {error.msg}") from None
    except (ValueError, RecursionError, MemoryError):
        raise CallFault(f"{shown(text)} is not a list of calls") from None
    return list(body.elts) if isinstance(body, ast.List | ast.Tuple) else [body]


def _reader(item: ast.expr) -> Callable[[], ToolCall]:
    return lambda: _call(item)


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
        arguments[keyword.arg] = _literal(keyword.value, 0)
    return ToolCall(name, arguments)


def _dotted(node: ast.expr) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        raise CallFault("a call begins with the name of a tool")
    return ".".join([node.id, *reversed(parts)])


def _literal(node: ast.expr, depth: int) -> Any:
    """Return what a literal stands for, in the types that JSON has."""
    if depth > _DEEPEST:
        raise CallFault("an argument is nested too deeply")
    if isinstance(node, ast.Constant) and isinstance(node.value, str | bool | int | float | None):
        return _checked(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _literal(node.operand, depth + 1)
        if type(value) in (int, float):
            return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(part, depth + 1) for part in node.elts]
    if isinstance(node, ast.Dict):
        keys = [None if key is None else _literal(key, depth + 1) for key in node.keys]
        if not all(isinstance(key, str) for key in keys) or len(set(keys)) < len(keys):
            raise CallFault("the keys of a dictionary must be texts, each there once")
        values = (_literal(value, depth + 1) for value in node.values)
        return dict(zip(keys, values, strict=True))
    if isinstance(node, ast.Name) and node.id in ("true", "false", "null"):
        return {"true": True, "false": False, "null": None}[node.id]
    raise CallFault("an argument must be a literal: text, number, True, False, None, list or dictionary")


def _checked(value: str | float | None) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        raise CallFault("a number is too large")
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise CallFault("a text has half a character (a lone surrogate)") from None
    return value


def _write(calls: Sequence[ToolCall]) -> str:
    return f"[{', '.join(_written(call) for call in calls)}]"


def _written(call: ToolCall) -> str:
    return f"{call.name}({', '.join(f'{name}={value!r}' for name, value in call.arguments.items())})"


def _show_result(name: str, content: str) -> str:
    return content


def _explain(schemas: Schemas) -> str:
    return (
        "To call tools, reply with nothing but a list of calls in Python's syntax, with arguments by name, "
        "for example:\n[tool(parameter='value'), other(number=3)]"
    )


PYTHON_CALLS = CallFormat("python", _read, _write, _show_result, _explain)
