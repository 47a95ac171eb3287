"""What a reply calls, whatever format it is written in."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollgym.clients.protocol.tool_calls import ToolCall
from rollgym.clients.replies.json_values import CallFault, json_end, parse_json, shown
from rollgym.clients.replies.thinking import LONGEST, strip_thinking

Schemas = Mapping[str, Mapping[str, Any]]
"""JSON Schemas of the parameters of tools, by the tools' names."""

MOST_CANDIDATES = 1_000
"""No more calls of a reply are told apart, nor more parameters of a call."""
MOST_CALLS = 256
"""No more calls of a reply are read."""

_MOST_FAULTS = 5


class UnwritableCallError(ValueError):
    """A call that a format has no form for: a reader of the text would read something else."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What stands in a reply: calls, text beside them, and what was meant as a call and cannot be read.

    Attributes:
        calls: In the order in which they were said.
        content: The reply without thinking and without calls.
        faults: One sentence for each call that cannot be read.
        remaining: The reply without the calls that were read: what cannot be read stays in place.
    """

    calls: tuple[ToolCall, ...] = ()
    content: str = ""
    faults: tuple[str, ...] = ()
    remaining: str = ""


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """How calls look to an engine that holds a policy to them, in the words of xgrammar's structural tags.

    Attributes:
        tag: Makes the tag of a call, from the tool's name and the schema of its parameters. None where the format has
            none for it.
        opening: What stands before all calls.
        separator: What stands between two.
        closing: What stands behind them.
        marked: Whether a call's beginning is none that JSON can have.
    """

    tag: Callable[[str, Mapping[str, Any]], Mapping[str, Any] | None]
    opening: str = ""
    separator: str = ""
    closing: str = ""
    marked: bool = False


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How calls are written; all of it pure.

    Attributes:
        name: Of the format.
        reader: Reads what a reply says outside thinking; whether strictly is its last argument. No text makes it raise.
        writer: Writes calls, and what was said beside them.
        explain: Tells a policy how to write calls, given the tools.
        show_result: Writes what a tool of a name gave, for the observation.
        written_as: What has to be read of calls that were written, and the schemas to read it by, where those of the
            tools are not known.
        mark: What stands before a call; empty where nothing tells a call from its beginning on.
        bare: How a reply begins that is a call without its mark, blanks aside; empty if the format has no such form.
        whole: Whether all that follows the mark has to be calls: one that cannot be read makes text of all of them.
        grammar: How a policy is held to calls; None if it cannot be.
        template_marks: Texts by which a chat template is known to write calls so: one of them is enough. Empty where
            no model's template does.
        form: How a call looks, in Markdown, for the documentation's table.
        used_by: Who writes calls so, for the same table.
    """

    name: str
    reader: Callable[[str, Schemas, bool], Reading]
    writer: Callable[[Sequence[ToolCall], str, Schemas], str]
    explain: Callable[[Schemas], str]
    show_result: Callable[[str, str], str] = lambda name, content: content
    written_as: Callable[[Sequence[ToolCall]], tuple[Sequence[ToolCall], Schemas]] = lambda calls: (calls, {})
    mark: str = ""
    bare: str = ""
    whole: bool = False
    grammar: CallGrammar | None = None
    template_marks: tuple[str, ...] = ()
    form: str = ""
    used_by: str = ""

    def read(self, text: str, schemas: Schemas, *, strict: bool = True) -> Reading:
        """Read what a reply says outside thinking; no text raises.

        Args:
            text: What it says.
            schemas: What can be called, for formats without types of their own.
            strict: Whether a call has to be well formed to the letter. Otherwise what inference servers let pass is
                read: keys beside name and arguments, names that are there twice, a last call that is not closed.
        """
        return self.reader(text, schemas, strict)

    def write(self, calls: Sequence[ToolCall], content: str = "", schemas: Schemas | None = None) -> str:
        """Write calls as a policy would, so that they are read as they are.

        Args:
            calls: In order.
            content: What was said beside them. It stands before the calls; the format `python` has no place for it.
            schemas: Of the tools. Without them, values of formats without types of their own are taken to be of the
                types that their tools want.

        Raises:
            UnwritableCallError: The format has no form for them.
        """
        try:
            text = self.writer(calls, content, schemas or {})
        except (TypeError, ValueError, RecursionError) as error:
            raise UnwritableCallError(
                f"the call cannot be written in the format {self.name}: {error}"
            ) from error
        if len(text) > LONGEST:
            raise UnwritableCallError(f"the call is too long: of a reply, {LONGEST} characters are read")
        expected, known = (calls, schemas) if schemas else self.written_as(calls)
        read = read_calls(text, self, known, max(len(calls), 1))
        if (difference := _difference(expected, read)) is not None:
            raise UnwritableCallError(f"the format {self.name} has no form for the call: {difference}")
        return text


def _difference(calls: Sequence[ToolCall], reading: Reading) -> str | None:
    """Say in what the calls that were read are others than those that were meant."""
    if reading.faults:
        return reading.faults[0]
    if len(reading.calls) != len(calls):
        return f"{len(reading.calls)} calls are read of {len(calls)}"
    for meant, read in zip(calls, reading.calls, strict=True):
        if meant.name != read.name:
            return f"the tool {shown(meant.name)} is read as {shown(read.name)}"
        if list(meant.arguments) != list(read.arguments):
            return f"other parameters of {meant.name} are read: {shown(', '.join(read.arguments))}"
        for name, value in meant.arguments.items():
            # As JSON, so that 1 is neither true nor 1.0.
            written, got = json.dumps(value), json.dumps(read.arguments[name])
            if written != got:
                return f"{shown(name)} of {meant.name} is read as {shown(got)}, and not as {shown(written)}"
    return None


def read_calls(reply: str, form: CallFormat, schemas: Schemas, limit: int = 16) -> Reading:
    """Read the calls of a reply; thinking is passed over, and no text raises.

    Args:
        reply: What the policy said.
        form: How it writes calls.
        schemas: What can be called, for formats without types of their own.
        limit: Most calls of one reply; those beyond it are faults.
    """
    # Half a character (a lone surrogate) is not text that can be kept or sent.
    text = strip_thinking(reply).encode(errors="replace").decode()
    reading = form.read(text, schemas)
    faults = reading.faults[:_MOST_FAULTS]
    if len(reading.faults) > _MOST_FAULTS:
        faults = (*faults, f"and {len(reading.faults) - _MOST_FAULTS} more")
    if len(reading.calls) > limit:
        faults = (*faults, f"{len(reading.calls)} calls in one reply, and at most {limit} are allowed")
    return Reading(reading.calls[:limit], reading.content, faults, reading.remaining)


# -- parts of grammars ---------------------------------------------------------------------------------------------


def json_tag(begin: str, schema: Mapping[str, Any], end: str) -> Mapping[str, Any] | None:
    """Return the tag of a call whose arguments are JSON; None for a schema of something that is not an object.

    Args:
        begin: What stands before the arguments.
        schema: Of the arguments. Unless it says whether others than it names are allowed, they are not, as
            inference servers have it.
        end: What stands behind them.
    """
    if schema.get("type", "object") != "object":
        return None
    named = "properties" in schema and not _COMBINED & schema.keys()
    arguments = {"type": "object", **({"additionalProperties": False} if named else {}), **schema}
    return tag(begin, {"type": "json_schema", "json_schema": arguments}, end)


_COMBINED = frozenset({"$ref", "allOf", "anyOf", "oneOf", "patternProperties", "unevaluatedProperties"})


def tag(begin: str, content: Mapping[str, Any], end: str) -> Mapping[str, Any]:
    """Return the tag of what stands between two texts."""
    return {"type": "tag", "begin": begin, "content": content, "end": end}


# -- parts of readers ----------------------------------------------------------------------------------------------


def parse_arguments(value: Any, *, strict: bool = True) -> Mapping[str, Any]:
    """Return arguments that came as an object, or as JSON text of one.

    Raises:
        CallFault: If they are something else.
    """
    if isinstance(value, str):
        value = parse_json(value, strict=strict)
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


def call_of_object(value: Any, arguments_name: str, *, strict: bool = True) -> ToolCall:
    """Return the call that a JSON object stands for: `name`, the arguments, and nothing else but an id.

    Args:
        value: What was read.
        arguments_name: How the format calls the arguments.
        strict: Otherwise further keys are passed over, and the arguments may be called `arguments` or `parameters`.

    Raises:
        CallFault: If it is not one.
    """
    if not isinstance(value, dict):
        raise CallFault("a call is a JSON object")
    unknown = value.keys() - {"name", arguments_name, "id", "type"}
    if strict and unknown:
        raise CallFault(f"a call has no {shown(sorted(unknown)[0])}; it has a name and {arguments_name}")
    arguments = value.get(arguments_name, {})
    if not strict:
        arguments = value.get("arguments", value.get("parameters", {}))
    call_id = value.get("id", "")
    return ToolCall(
        parse_name(value.get("name")),
        parse_arguments(arguments, strict=strict),
        call_id if isinstance(call_id, str) else "",
    )


def is_meant_as_call(value: Any, schemas: Schemas) -> bool:
    """Whether an object without a mark before it is a call, and no answer in JSON that has a name in it.

    It names a tool that was offered, or has a name and arguments, and nothing else where tools are known.

    Args:
        value: What was read.
        schemas: Of the tools that were offered.
    """
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return False
    if value["name"].strip() in schemas:
        return True
    keys = value.keys() - {"name", "id", "type"}
    if schemas:
        return keys in ({"arguments"}, {"parameters"})
    return not keys.isdisjoint({"arguments", "parameters"})


def split_at_mark(text: str, mark: str, separator: re.Pattern[str]) -> tuple[str, str, str]:
    """Split a text at a mark, as `str.partition` does; a mark in JSON that the text begins with is none.

    Args:
        text: What was said.
        mark: What stands before calls.
        separator: What may stand between two values of JSON.
    """
    begin, place = 0, text.find(mark)
    while 0 <= begin <= place:
        end = json_end(text, begin)
        if end is None:
            break
        if end > place:
            place = text.find(mark, end)
        between = separator.match(text, end)
        begin = end if between is None else between.end()
    return (text, "", "") if place < 0 else (text[:place], mark, text[place + len(mark) :])


def said_around(before: str, behind: str) -> str:
    """Return what is said before and behind calls, without the blanks that lead over from them."""
    return before + behind if before.strip() else behind.lstrip()


@dataclass(frozen=True, slots=True)
class Candidate:
    """What is meant as a call.

    Attributes:
        start: Its begin in the text.
        end: Its end.
        read: Reads it, or raises `CallFault`.
    """

    start: int
    end: int
    read: Callable[[], ToolCall]


def collect(text: str, candidates: Sequence[Candidate]) -> Reading:
    """Read each call by itself, and note those that cannot be read; the first few hundred are looked at.

    Args:
        text: What was said.
        candidates: What of it is meant as a call, in order.
    """
    calls, faults = _read_all([each.read for each in candidates])
    outside, kept, place = [], [], 0
    for candidate, call in zip(candidates, calls, strict=True):
        outside.append(text[place : candidate.start])
        kept.append(text[place : candidate.end if call is None else candidate.start])
        place = candidate.end
    rest = text[place:]
    return Reading(
        tuple(filter(None, calls)), "".join([*outside, rest]).strip(), faults, "".join([*kept, rest])
    )


def collect_whole(text: str, content: str, readers: Sequence[Callable[[], ToolCall]]) -> Reading:
    """Read calls that are all of a reply but the content before them.

    Args:
        text: What was said.
        content: What of it stands before the calls.
        readers: Read one call each, or raise `CallFault`.
    """
    calls, faults = _read_all(readers)
    return Reading(tuple(filter(None, calls)), content.strip(), faults, text if faults else content)


def _read_all(
    readers: Sequence[Callable[[], ToolCall]],
) -> tuple[list[ToolCall | None], tuple[str, ...]]:
    calls: list[ToolCall | None] = []
    faults: list[str] = []
    for read in readers[:MOST_CALLS]:
        try:
            calls.append(read())
        except CallFault as fault:
            calls.append(None)
            faults.append(str(fault))
    beyond = len(readers) - len(calls)
    faults += [f"only {MOST_CALLS} calls of one reply are looked at"] * beyond
    return [*calls, *[None] * beyond], tuple(faults)
