"""Literals of Python in what a policy writes: read as syntax, never run, and bounded before they are parsed."""

import ast
import json
import math
import re
import warnings
from typing import Any

from envs.tools.calls import CallFault, shown

_LONGEST = 100_000
_DEEPEST = 50
# Python writes no whole number that is longer, neither as text nor as JSON; `0xff...` is read at any length.
_MOST_DIGITS = 4_300
_BEYOND = 10**_MOST_DIGITS
# Python's parser takes its time over many brackets that never close, and over long runs of signs.
_MARKS = re.compile(
    r"(?P<text>'(?:[^'\\\n]|\\.)*+'|\"(?:[^\"\\\n]|\\.)*+\")|(?P<open>[\[({])|(?P<close>[\])}])|[-+~]{20,}+"
)


def parse_expression(text: str) -> ast.expr:
    """Parse one expression.

    Raises:
        CallFault: It is none, or is too long or too deep to be looked at.
    """
    if len(text) > _LONGEST:
        raise CallFault(f"the expression has over {_LONGEST} characters")
    if not _is_shallow(text):
        raise CallFault(f"{shown(text)} is nested too deeply")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            return ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise CallFault(f"{shown(text)} is no expression of Python: {error.msg}") from None
    except (ValueError, RecursionError, MemoryError):
        raise CallFault(f"{shown(text)} is no expression of Python") from None


def _is_shallow(text: str) -> bool:
    depth = 0
    for mark in _MARKS.finditer(text):
        if mark["open"]:
            depth += 1
            if depth > _DEEPEST:
                return False
        elif mark["close"]:
            depth = max(0, depth - 1)
        elif not mark["text"]:
            return False
    return True


def literal_of(node: ast.expr, *, text_keys: bool = True) -> Any:
    """Return what a literal stands for, in the types that JSON has.

    Args:
        node: The literal.
        text_keys: Whether the keys of a dictionary must be texts; numbers and the like become texts otherwise, as
            writers of JSON make them.

    Raises:
        CallFault: It is no literal, or JSON has no form for it.
    """
    return _literal(node, 0, text_keys)


def _literal(node: ast.expr, depth: int, text_keys: bool) -> Any:
    if depth > _DEEPEST:
        raise CallFault("an argument is nested too deeply")
    if isinstance(node, ast.Constant) and isinstance(node.value, str | bool | int | float | None):
        return _checked(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _literal(node.operand, depth + 1, text_keys)
        if type(value) in (int, float):
            return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(part, depth + 1, text_keys) for part in node.elts]
    if isinstance(node, ast.Dict):
        keys = [_key(key, text_keys) for key in node.keys]
        if len(set(keys)) < len(keys):
            raise CallFault("the keys of a dictionary must be there once each")
        values = (_literal(value, depth + 1, text_keys) for value in node.values)
        return dict(zip(keys, values, strict=True))
    if isinstance(node, ast.Name) and node.id in ("true", "false", "null"):
        return {"true": True, "false": False, "null": None}[node.id]
    raise CallFault("an argument must be a literal: text, number, True, False, None, list or dictionary")


def _key(node: ast.expr | None, text_keys: bool) -> str:
    if not isinstance(node, ast.Constant) or not isinstance(node.value, str | bool | int | float | None):
        raise CallFault("the keys of a dictionary must be texts")
    key = _checked(node.value)
    if isinstance(key, str):
        return key
    if text_keys:
        raise CallFault("the keys of a dictionary must be texts")
    return json.dumps(key)


def _checked(value: Any) -> Any:
    if isinstance(value, int) and value >= _BEYOND:
        raise CallFault(f"a number has over {_MOST_DIGITS} digits")
    if isinstance(value, float) and not math.isfinite(value):
        raise CallFault("a number is too large")
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise CallFault("a text has half a character (a lone surrogate)") from None
    return value
