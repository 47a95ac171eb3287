"""What replies of the double must look like: regular expressions and small schemas over bytes, read by `regex`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import regex

from tests.support.inference_server.http import BadRequest


@dataclass(frozen=True)
class Structure:
    """A regular expression that whole replies match."""

    pattern: regex.Pattern[str]

    def mask(self, logits: np.ndarray, said: str, ends: Sequence[int]) -> np.ndarray:
        """Take the probability from tokens with which no reply goes on that matches."""
        allowed = np.zeros(len(logits), dtype=bool)
        for token in range(128):
            allowed[token] = self.pattern.fullmatch(said + chr(token), partial=True) is not None
        if self.pattern.fullmatch(said) is not None:
            allowed[list(ends)] = True
        return np.where(allowed, logits, -np.inf)


def structure(kind: str, text: Any) -> Structure:
    """Read what a request asks for.

    Raises:
        BadRequest: If it is malformed, or nothing that is known here.
    """
    readers = {"json": _of_schema, "structural_tag": lambda tag: _of_format(tag["format"])}
    try:
        return Structure(regex.compile(readers[kind](json.loads(text)) if kind in readers else text))
    except (regex.error, ValueError, TypeError, KeyError) as error:
        raise BadRequest(f"Failed to compile {kind} grammar: {error}") from error


def of_vllm(params: dict[str, Any]) -> Structure | None:
    """Read `structured_outputs`."""
    asked = params.get("structured_outputs")
    if asked is None:
        return None
    kinds = [
        kind
        for kind in ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
        if asked.get(kind) is not None
    ]
    if len(kinds) != 1:
        raise BadRequest(f"You must use one kind of structured outputs constraint: {asked}")
    return structure(kinds[0], asked[kinds[0]])


def of_sglang(params: dict[str, Any]) -> Structure | None:
    """Read `json_schema`, `regex` and `structural_tag`."""
    names = ("json_schema", "regex", "ebnf", "structural_tag")
    asked = {name: params[name] for name in names if params.get(name)}
    if len(asked) > 1:
        raise BadRequest("Only one of json_schema, regex, ebnf, or structural_tag can be set.")
    for name, text in asked.items():
        return structure("json" if name == "json_schema" else name, text)
    return None


def _of_format(form: dict[str, Any]) -> str:
    """Read a structural tag of xgrammar's."""
    kind = form["type"]
    if kind == "const_string":
        return regex.escape(form["value"])
    if kind == "json_schema":
        return _of_schema(form["json_schema"])
    if kind == "tag":
        return f"{regex.escape(form['begin'])}({_of_format(form['content'])}){regex.escape(form['end'])}"
    if kind == "sequence":
        return "".join(f"({_of_format(each)})" for each in form["elements"])
    if kind == "or":
        return "|".join(f"({_of_format(each)})" for each in form["elements"])
    if kind == "tags_with_separator":
        one = "|".join(f"({_of_format(each)})" for each in form["tags"])
        more = "" if form["stop_after_first"] else f"({regex.escape(form['separator'])}({one}))*"
        return f"({one}){more}" if form["at_least_one"] else f"(({one}){more})?"
    raise ValueError(f"the double knows no format like {kind}")


def _of_schema(schema: dict[str, Any]) -> str:
    if schema.get("type") == "integer":
        return "-?[0-9]+"
    if "enum" in schema:
        return "|".join(regex.escape(json.dumps(each)) for each in schema["enum"])
    if schema.get("type") == "object" and "properties" in schema:
        parts = [f'"{name}": ({_of_schema(each)})' for name, each in schema["properties"].items()]
        return r"\{" + ", ".join(parts) + r"\}"
    if schema.get("type") == "object":
        return r'\{("[a-z]+": [0-9]+)?\}'
    raise ValueError(f"the double knows no schema like {schema}")
