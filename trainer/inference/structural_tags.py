"""Structural tags, as xgrammar has them and with it vLLM and SGLang, in the grammars of llguidance. No I/O.

They say what a call of a tool looks like: JSON of a schema between marks. Only the formats are known that calls are
made of (`rollgym.clients.replies.formats`).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_ANY_TEXT = "ANY_TEXT: /(.|\\n)*/"
Format = Mapping[str, Any]


def lark_of(structural_tag: str) -> str:
    """Return a structural tag as a grammar of Lark, as llguidance reads it.

    Raises:
        ValueError: If it is malformed, or of a format that is not known here.
    """
    rules = _Rules()
    try:
        start = rules.expression(json.loads(structural_tag)["format"])
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"the structural tag is malformed: {error!r}") from error
    return "\n".join([f"start: {start}", *rules.lines])


class _Rules:
    """Writes formats as expressions.

    Attributes:
        lines: Rules that the expressions name.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._expressions: Mapping[str, Callable[[Format], str]] = {
            "const_string": self._const_string,
            "json_schema": self._json_schema,
            "sequence": self._sequence,
            "or": self._or,
            "optional": self._optional,
            "tag": self._tag,
            "tags_with_separator": self._tags_with_separator,
        }

    def expression(self, form: Format) -> str:
        """Return a format as an expression."""
        kind = form["type"]
        if kind not in self._expressions:
            raise ValueError(f"structural tags of the format {str(kind)[:40]!r} are not known here")
        return self._expressions[kind](form)

    def _named(self, name: str, rule: str, flags: str = "") -> str:
        name = f"{name}_{len(self.lines)}"
        self.lines.append(f"{name}{flags}: {rule}")
        return name

    def _const_string(self, form: Format) -> str:
        return _literal(form["value"])

    def _json_schema(self, form: Format) -> str:
        return self._named("json", f"%json {json.dumps(form['json_schema'])}")

    def _sequence(self, form: Format) -> str:
        return " ".join(map(self.expression, form["elements"]))

    def _or(self, form: Format) -> str:
        return _alternatives([self.expression(each) for each in form["elements"]])

    def _optional(self, form: Format) -> str:
        return f"({self.expression(form['content'])})?"

    def _tag(self, form: Format) -> str:
        begin, content, end = form["begin"], form["content"], form["end"]
        if content["type"] == "any_text":
            if _ANY_TEXT not in self.lines:
                self.lines.append(_ANY_TEXT)
            # The first end is the end.
            return f"{_literal(begin)} {self._named('text', f'ANY_TEXT {_literal(end)}', '[lazy]')}"
        return f"{_literal(begin)} {self.expression(content)} {_literal(end)}"

    def _tags_with_separator(self, form: Format) -> str:
        # Named, so that what repeats is written once.
        one = self._named("call", _alternatives([self.expression(each) for each in form["tags"]]))
        some = one if form["stop_after_first"] else f"{one} ({_literal(form['separator'])} {one})*"
        return some if form["at_least_one"] else f"({some})?"


def _literal(text: str) -> str:
    return json.dumps(text)


def _alternatives(expressions: Sequence[str]) -> str:
    return f"({' | '.join(expressions)})"
