"""JSON in what a policy writes: read as it stands, nothing mended; and written so that it is read back."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

_MAX_SHOWN = 120
_DEEPEST = 500
"""How deep values may be nested. How deep a reader can go at all depends on the release of Python."""

_BLANKS = re.compile(r"[ \t\r\n]*+")
_EXTENTS = json.JSONDecoder()
# What readers of replies look for, wherever it stands.
_MARKS = re.compile(
    r"</?(?:think|thinking|thought|tool_call)>|\[TOOL_CALLS\]|<\|python_tag\|>", re.IGNORECASE
)


class CallFault(ValueError):  # noqa: N818 - the field says malformed call, and never error, which tools give
    """A call cannot be read; the message says why, to the policy."""


def shown(text: str) -> str:
    """Return a text for a message, cut if it is long."""
    return repr(text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}...")


# -- reading -------------------------------------------------------------------------------------------------------


def parse_json(text: str, *, strict: bool = True) -> Any:
    """Read JSON: no NaN, no number beyond all bounds, nothing mended.

    Args:
        text: All of it.
        strict: Whether names that are there twice and lone surrogates are faults, too.

    Raises:
        CallFault: If it is not that.
    """
    try:
        value = json.loads(text, object_pairs_hook=_object if strict else None, parse_constant=_no_constant)
        # Few brackets cannot be deep, and cost no look.
        if text.count("[") + text.count("{") > _DEEPEST and not _is_shallow(value):
            raise CallFault("the JSON is nested too deeply")
        written = json.dumps(value, ensure_ascii=False, allow_nan=False)
        if strict:
            written.encode()
    except RecursionError:
        raise CallFault("the JSON is nested too deeply") from None
    except UnicodeEncodeError:
        raise CallFault("the JSON has half a character (a lone surrogate)") from None
    except json.JSONDecodeError as error:
        raise CallFault(f"{shown(text)} is not JSON: {error.msg} at character {error.pos}") from None
    except CallFault:
        raise
    except ValueError as error:
        raise CallFault(f"{shown(text)} is not JSON: {error}") from None
    return value


def json_end(text: str, begin: int) -> int | None:
    """Return where the JSON object or list ends that stands behind blanks at a place; None otherwise.

    What is in its texts ends nothing.
    """
    begin = behind_blanks(text, begin)
    if text[begin : begin + 1] not in ("{", "["):
        return None
    try:
        return _EXTENTS.raw_decode(text, begin)[1]
    except (ValueError, RecursionError):
        return None


def behind_blanks(text: str, begin: int) -> int:
    """Return the first place that is not a blank of JSON."""
    blanks = _BLANKS.match(text, begin)
    return begin if blanks is None else blanks.end()


def _is_shallow(value: Any) -> bool:
    """Whether a value of JSON is so little nested that every reader and writer can take it."""
    level = [value]
    for _ in range(_DEEPEST + 1):
        level = [part for each in level for part in _parts(each)]
        if not level:
            return True
    return False


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list | tuple) else ()


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        times = Counter(name for name, _ in pairs)
        twice = next(name for name, count in times.items() if count > 1)
        raise CallFault(f"{shown(twice)} is there twice")
    return found


def _no_constant(name: str) -> Any:
    raise CallFault(f"{name} is not JSON")


# -- writing -------------------------------------------------------------------------------------------------------


def as_json(value: Any) -> str:
    """Write JSON as models do: with blanks after commas and colons, and all characters as they are.

    Raises:
        TypeError: It holds what JSON has no form for, such as a key that is not text.
        ValueError: It holds a number or a character that JSON has no form for, or is nested too deeply.
    """
    _require_json(value)
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("a text has half a character (a lone surrogate)") from None
    return text


def as_json_of_calls(value: Any) -> str:
    """Write JSON in which no text holds a mark that a reader would take for one of its own: `<` is `\\u003c` there.

    Raises:
        TypeError: As `as_json`.
        ValueError: As `as_json`.
    """
    return _MARKS.sub(lambda mark: f"\\u{ord(mark[0][0]):04x}{mark[0][1:]}", as_json(value))


def without_marks(literals: str) -> str:
    """Return literals of Python in whose texts no mark stands that a reader would take for one of its own."""
    return _MARKS.sub(lambda mark: f"\\x{ord(mark[0][0]):02x}{mark[0][1:]}", literals)


def _require_json(value: Any) -> None:
    """Make sure that no key is other than text, which JSON would make of it, and that readers go as deep."""
    level = [value]
    for _ in range(_DEEPEST + 1):
        for each in level:
            if isinstance(each, Mapping) and not all(isinstance(key, str) for key in each):
                raise TypeError("the keys of an object must be texts")
        level = [part for each in level for part in _parts(each)]
        if not level:
            return
    raise ValueError("it is nested too deeply")
