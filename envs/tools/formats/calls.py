"""What a reply calls, whatever format it is written in."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollgym.clients.protocol.tool_calls import CALL_WRITERS, ToolCall
from rollgym.envs.core.replies import strip_thinking

Schemas = Mapping[str, Mapping[str, Any]]
"""JSON Schemas of the parameters of tools, by the tools' names."""

_MAX_SHOWN = 120
_MOST_FAULTS = 5
_MOST_READ = 256
# How deep a reader can go at all depends on the release of Python.
_DEEPEST = 500


@dataclass(frozen=True, slots=True)
class Reading:
    """What stands in a reply: calls, text beside them, and what was meant as a call and cannot be read.

    Attributes:
        calls: In the order in which they were said.
        content: The reply without thinking and without calls.
        faults: One sentence for each call that cannot be read.
    """

    calls: tuple[ToolCall, ...] = ()
    content: str = ""
    faults: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How calls are written; all of it pure, and no text makes `read` raise.

    Attributes:
        name: Of the format.
        read: Reads what a reply says outside thinking.
        explain: Tells a policy how to write calls, given the tools.
        show_result: Writes what a tool of a name gave, for the observation.
    """

    name: str
    read: Callable[[str, Schemas], Reading]
    explain: Callable[[Schemas], str]
    show_result: Callable[[str, str], str] = lambda name, content: content

    def write(self, calls: Sequence[ToolCall]) -> str:
        """Write calls as a policy would."""
        return CALL_WRITERS[self.name](calls)


class CallFault(ValueError):  # noqa: N818 - the field says malformed call, and never error, which tools give
    """A call cannot be read; the message says why, to the policy."""


def read_calls(reply: str, form: CallFormat, schemas: Schemas, limit: int = 16) -> Reading:
    """Read the calls of a reply; thinking is passed over, and no text raises.

    Args:
        reply: What the policy said.
        form: How it writes calls.
        schemas: What can be called, for formats without types of their own.
        limit: Most calls of one reply; those beyond it are faults.
    """
    # Half a character (a lone surrogate) is no text that can be kept or sent.
    text = strip_thinking(reply).encode(errors="replace").decode()
    reading = form.read(text, schemas)
    faults = reading.faults[:_MOST_FAULTS]
    if len(reading.faults) > _MOST_FAULTS:
        faults = (*faults, f"and {len(reading.faults) - _MOST_FAULTS} more")
    if len(reading.calls) > limit:
        faults = (*faults, f"{len(reading.calls)} calls in one reply, and at most {limit} are allowed")
    return Reading(reading.calls[:limit], reading.content, faults)


def parse_json(text: str) -> Any:
    """Read strict JSON: no duplicate names, no NaN, no lone surrogates, nothing mended.

    Raises:
        CallFault: If it is not that.
    """
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_no_constant)
        # Few brackets cannot be deep, and cost no look.
        if text.count("[") + text.count("{") > _DEEPEST and not is_shallow(value):
            raise CallFault("the JSON is nested too deeply")
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
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


def is_shallow(value: Any) -> bool:
    """Whether a value of JSON is so little nested that every reader and writer can take it."""
    level = [value]
    for _ in range(_DEEPEST + 1):
        level = [part for each in level for part in _parts(each)]
        if not level:
            return True
    return False


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def parse_arguments(value: Any) -> Mapping[str, Any]:
    """Return arguments that came as an object, or as JSON text of one.

    Raises:
        CallFault: If they are something else.
    """
    if isinstance(value, str):
        value = parse_json(value)
    if not isinstance(value, dict):
        raise CallFault("the arguments must be an object with a value for each parameter")
    return value


def parse_name(value: Any) -> str:
    """Return the name in a call.

    Raises:
        CallFault: If there is none.
    """
    if not isinstance(value, str) or not value.strip():
        raise CallFault("the call has no name")
    return value.strip()


def call_of_object(value: Any, arguments_name: str) -> ToolCall:
    """Return the call that a JSON object stands for: `name`, the arguments, and nothing else but an id.

    Raises:
        CallFault: If it is not one.
    """
    if not isinstance(value, dict):
        raise CallFault("a call is a JSON object")
    if unknown := value.keys() - {"name", arguments_name, "id", "type"}:
        raise CallFault(f"a call has no {shown(sorted(unknown)[0])}; it has a name and {arguments_name}")
    call_id = value.get("id", "")
    return ToolCall(
        parse_name(value.get("name")),
        parse_arguments(value.get(arguments_name, {})),
        call_id if isinstance(call_id, str) else "",
    )


def collect(items: Sequence[Callable[[], ToolCall]], content: str) -> Reading:
    """Read each call by itself, and note those that cannot be read.

    Args:
        items: Read one call each, or raise `CallFault`; the first few hundred are looked at.
        content: The text beside them.
    """
    calls, faults = [], []
    for item in items[:_MOST_READ]:
        try:
            calls.append(item())
        except CallFault as fault:
            faults.append(str(fault))
    faults += [f"only {_MOST_READ} calls of one reply are looked at"] * (len(items) - _MOST_READ)
    return Reading(tuple(calls), content.strip(), tuple(faults))


def shown(text: str) -> str:
    """Return a text for a message, cut where it is long."""
    return repr(text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}...")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        times = Counter(name for name, _ in pairs)
        twice = next(name for name, count in times.items() if count > 1)
        raise CallFault(f"{shown(twice)} is there twice")
    return found


def _no_constant(name: str) -> Any:
    raise CallFault(f"{name} is not JSON")
