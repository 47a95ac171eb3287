"""Structured output, as requested by the APIs of OpenAI, Anthropic, vLLM and SGLang. Nothing here does I/O."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from rollgym.clients.protocol.json_text import read_json
from rollgym.trainer.inference.base import StructuredOutput
from rollgym.trainer.rollout.agents.errors import invalid, unsupported

_MOST_BYTES = 1 << 15
_DEEPEST = 64
_MOST_CHOICES = 1000
_OBJECT = '{"type": "object"}'
_SPECIAL = frozenset("\\.+*?()|[]{}^$/")
_ADDRESS = re.compile(r"[\w.~:/?#\[\]@!$&'()+*,;=%-]*", re.ASCII)
_Kind = Literal["json", "regex", "grammar", "choice"]
_FIELDS: Mapping[str, _Kind] = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
}
"""Fields of earlier vLLM releases and of SGLang."""
_PARTS: Mapping[str, _Kind] = {"json": "json", "regex": "regex", "choice": "choice", "grammar": "grammar"}
"""Fields of vLLM within `structured_outputs`."""
_NOT_HERE = ("structural_tag",)
STRUCTURED_FIELDS = frozenset((*_FIELDS, *_NOT_HERE, "structured_outputs"))
"""Fields beside those of OpenAI and Anthropic."""


@dataclass(frozen=True, slots=True)
class RequiredForm:
    """The form that a reply must have.

    Attributes:
        output: The constraint, as the inference engine receives it.
        param: The field that asks for it.
        spare: Fields that are ignored if the engine cannot constrain the reply; if empty, the request is refused.
        begins: How a reply of tool calls begins, if the reply may be either calls or an answer. No part of an answer is
            taken for a call.
    """

    output: StructuredOutput
    param: str
    spare: tuple[str, ...] = ()
    begins: tuple[str, ...] = ()


def wanted_output(body: Mapping[str, Any], form: object, param: str) -> RequiredForm | None:
    """Return what a request wants its reply to look like; None if it sets no form.

    Args:
        body: The request.
        form: The API's own form, such as the value of `response_format`.
        param: Name of that field.

    Raises:
        ApiError: If it is malformed or too large, names an unknown kind, or sets two forms.
    """
    found = [_of_format(form, param), _of_structured_outputs(body.get("structured_outputs"))]
    found += [_of_field(body, name) for name in (*_FIELDS, *_NOT_HERE)]
    named = [each for each in found if each is not None]
    if len(named) > 1:
        raise invalid(
            f"{' and '.join(each.param for each in named)}: only one of them can be asked for", named[1].param
        )
    return named[0] if named else None


def _of_format(form: object, param: str) -> RequiredForm | None:
    """Read OpenAI's formats, and Anthropic's: their schema stands beside the type or one level below."""
    if form is None:
        return None
    if not isinstance(form, Mapping):
        raise invalid(f"{param} must be an object with a type", param)
    kind = form.get("type")
    if kind in (None, "text"):
        return None
    if kind == "json_object":
        return RequiredForm(StructuredOutput("json", _OBJECT), param)
    if kind != "json_schema":
        raise unsupported(
            f"{param}: the type must be text, json_object or json_schema, not {str(kind)[:40]!r}", param
        )
    nested = form.get("json_schema")
    holder, at = (nested, f"{param}.json_schema") if "json_schema" in form else (form, param)
    if not isinstance(holder, Mapping) or not isinstance(holder.get("schema"), Mapping | bool):
        raise invalid(f"{at}.schema must be a JSON schema, an object", f"{at}.schema")
    if not isinstance(holder.get("name"), str | None):
        raise invalid(f"{at}.name must be text", f"{at}.name")
    if not isinstance(holder.get("strict"), bool | None):
        raise invalid(f"{at}.strict must be true or false", f"{at}.strict")
    return RequiredForm(StructuredOutput("json", _schema_text(holder["schema"], f"{at}.schema")), param)


def _of_structured_outputs(value: object) -> RequiredForm | None:
    param = "structured_outputs"
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise invalid(f"{param} must be an object, such as {{'json': SCHEMA}}", param)
    named = [name for name, each in value.items() if each is not None and each is not False]
    if named == ["json_object"] and value["json_object"] is True:
        return RequiredForm(StructuredOutput("json", _OBJECT), param)
    if len(named) != 1 or named[0] not in _PARTS:
        raise unsupported(
            f"{param} must have one of {', '.join(_PARTS)} and json_object, and nothing else", param
        )
    return RequiredForm(_output(_PARTS[named[0]], value[named[0]], f"{param}.{named[0]}"), param)


def _of_field(body: Mapping[str, Any], name: str) -> RequiredForm | None:
    value = body.get(name)
    if value is None or value == "":  # SGLang takes an empty text for none
        return None
    if name in _NOT_HERE:
        raise unsupported(
            f"{name} is not supported: give a JSON schema, a regular expression or a grammar", name
        )
    return RequiredForm(_output(_FIELDS[name], value, name), name)


def _output(kind: _Kind, value: object, param: str) -> StructuredOutput:
    if kind == "json":
        return StructuredOutput("json", _schema_text(value, param))
    if kind == "choice":
        return StructuredOutput("regex", _bounded(_any_of(value, param), param))
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        what = "a regular expression" if kind == "regex" else "a grammar"
        raise invalid(f"{param} must be {what}, as text without NUL", param)
    return StructuredOutput(kind, _bounded(value, param))


def _any_of(value: object, param: str) -> str:
    """Return a regular expression for one of several texts."""
    if (
        not isinstance(value, list)
        or not 0 < len(value) <= _MOST_CHOICES
        or not all(isinstance(each, str) and each and "\0" not in each for each in value)
    ):
        raise invalid(
            f"{param} must be a list of 1 to {_MOST_CHOICES} texts, none of them empty or with NUL", param
        )
    return "|".join("".join(f"\\{each}" if each in _SPECIAL else each for each in text) for text in value)


def _schema_text(value: object, param: str) -> str:
    if isinstance(value, str):
        try:
            value = read_json(_bounded(value, param))
        except orjson.JSONDecodeError as error:
            raise invalid(f"{param} is no JSON: {str(error)[:200]}", param) from error
    if not isinstance(value, Mapping | bool):
        raise invalid(f"{param} must be a JSON schema, an object", param)
    if is_deep(value):
        raise unsupported(f"{param}: a schema may be nested {_DEEPEST} deep here, and no deeper", param)
    try:
        return _bounded(orjson.dumps(plain_schema(value)).decode(), param)
    except orjson.JSONEncodeError as error:
        raise invalid(f"{param} cannot be written as JSON: {str(error)[:200]}", param) from error


def plain_schema(schema: Mapping[str, Any] | bool) -> Mapping[str, Any] | bool:
    """Return a schema without an `$id` that is a mere name: libraries that compile schemas want an address there."""
    name = schema.get("$id") if isinstance(schema, Mapping) else None
    if not isinstance(schema, Mapping) or not isinstance(name, str) or _ADDRESS.fullmatch(name):
        return schema
    return {key: value for key, value in schema.items() if key != "$id"}


def is_deep(value: object) -> bool:
    """Whether a schema is nested deeper than is taken."""
    level: list[Any] = [value]
    for _ in range(_DEEPEST):
        level = [
            child
            for node in level
            for child in (node.values() if isinstance(node, dict) else node if isinstance(node, list) else ())
            if isinstance(child, dict | list)
        ]
        if not level:
            return False
    return True


def _bounded(text: str, param: str) -> str:
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise invalid(f"{param} holds half of a pair of surrogates", param) from error
    if size > _MOST_BYTES:
        raise unsupported(f"{param} has {size} bytes, and {_MOST_BYTES} are taken at most", param)
    return text
