"""Literals of Python in what a policy writes: read as syntax, never run, and bounded before they are parsed."""

import ast
import json
import math
import re
import warnings
from typing import Any

from rollgym.clients.replies.json_values import CallFault, shown

_LONGEST = 100_000
# The parser passes over texts and comments; what stands around them takes it a microsecond or two for each character.
_MOST_AROUND_TEXTS = 20_000
_DEEPEST = 50
# Python writes no whole number that is longer, neither as text nor as JSON; `0xff...` is read at any length.
_MOST_DIGITS = 4_300
_BEYOND = 10**_MOST_DIGITS
# A text that is never closed lasts until Python gives up. Nothing can fail behind it, so no place is looked at
# twice.
_TEXT = (
    r"'''(?:[^'\\]++|\\.|'(?!''))*(?:''')?"
    r'|"""(?:[^"\\]++|\\.|"(?!""))*(?:""")?'
    r"|'(?:[^'\\\n]++|\\.)*'?"
    r'|"(?:[^"\\\n]++|\\.)*"?'
)
# Python's parser takes its time over many brackets that never close, and over long runs of signs.
_MARKS = re.compile(
    r"(?P<formatted>(?<!\w)(?:[fFtT][rR]?|[rR][fFtT])['\"])"
    rf"|(?P<passed>{_TEXT}|\#[^\n]*+)|(?P<open>[\[({{])|(?P<close>[\])}}])"
    r"|(?P<signs>[-+~]{20,}+)",
    re.DOTALL,
)


class ExpressionParser:
    """Parses the expressions of one reply, and bounds what all of them cost together."""

    def __init__(self) -> None:
        self._left = _MOST_AROUND_TEXTS

    def parse(self, text: str) -> ast.expr:
        """Parse one expression.

        Raises:
            CallFault: It is none, or is too long or too deep to be looked at.
        """
        if len(text) > _LONGEST:
            raise CallFault(f"the expression has over {_LONGEST} characters")
        # As Python does: each of them ends a line, and with it a text that was not closed.
        text = text.replace("\r\n", "\n").replace("\r", "\n")
        self._left -= _around_texts(text, self._left)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SyntaxWarning)
                return ast.parse(text, mode="eval").body
        except SyntaxError as error:
            raise CallFault(f"{shown(text)} is no expression of Python: {error.msg}") from None
        except (ValueError, RecursionError, MemoryError):
            raise CallFault(f"{shown(text)} is no expression of Python") from None


def _around_texts(text: str, most: int) -> int:
    """Return how many characters stand outside of texts and comments, by one look at each.

    Raises:
        CallFault: They are more than `most`, or are what Python's parser takes long over.
    """
    depth = passed = 0
    for mark in _MARKS.finditer(text):
        if mark["formatted"]:
            # Some releases of Python begin again at each of its fields, and no literal has any.
            raise CallFault(f"{shown(text)} has a formatted text, which is no literal")
        if mark["passed"]:
            passed += len(mark[0])
        elif mark["open"]:
            depth += 1
        elif mark["close"]:
            depth = max(0, depth - 1)
        if depth > _DEEPEST or mark["signs"]:
            raise CallFault(f"{shown(text)} is nested too deeply")
        if mark.end() - passed > most:
            break
    if len(text) - passed > most:
        raise CallFault(f"{shown(text)} has too much outside of texts: over {_MOST_AROUND_TEXTS} characters")
    return len(text) - passed


def literal_of(node: ast.expr, *, text_keys: bool = True) -> Any:
    """Return what a literal stands for, in the types that JSON has.

    Args:
        node: The literal.
        text_keys: Whether the keys of a dictionary must be texts; numbers and the like become texts otherwise, as
            writers of JSON make them.

    Raises:
        CallFault: It is not a literal, or JSON has no form for it.
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
