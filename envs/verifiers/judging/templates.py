"""Templates: what a judge is asked, as data, and how its reply is read: strictly, and at its end alone."""

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from rollgym.clients.protocol.yaml_text import read_yaml
from rollgym.clients.replies.marks import ANSWER_WITHIN
from rollgym.clients.replies.thinking import strip_thinking
from rollgym.user_paths import expand_user

_AROUND = " \t*_`.\"'"
_LONGEST_SHOWN = 120
_LONGEST_LINE = 1_000
# Characters that are parsed in looking for an object: many that do not end, one in the other, are read again and again.
_MOST_READ = 1_000_000


class UnreadableVerdictError(Exception):
    """A judge's reply does not end in a verdict."""

    def __init__(self, reply: str) -> None:
        end = " ".join(reply.split())[-_LONGEST_SHOWN:]
        super().__init__(f"the judge's reply does not end in a verdict: ...{end!r}")


class _Reading(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TokenVerdict(_Reading):
    """The last line is one of some tokens, such as `[[YES]]`; a token without a score abstains."""

    kind: Literal["token"]
    tokens: Mapping[str, Annotated[float, Field(ge=0, le=1)] | None] = Field(min_length=2)

    def read(self, reply: str, weights: Sequence[float]) -> float | None:
        """Return the score of a reply, or None where the judge abstains.

        Raises:
            UnreadableVerdictError: It has no verdict.
        """
        lines = [line.strip(_AROUND) for line in strip_thinking(reply).splitlines() if line.strip(_AROUND)]
        if not lines or lines[-1] not in self.tokens:
            raise UnreadableVerdictError(reply)
        return self.tokens[lines[-1]]


class NumberVerdict(_Reading):
    """The reply ends in a JSON object with a number, which is scaled from [low, high] to [0, 1]; null abstains."""

    kind: Literal["number"]
    key: str
    low: float
    high: float

    @field_validator("high")
    @classmethod
    def _above(cls, high: float, info: Any) -> float:
        if not high > info.data.get("low", -math.inf):
            raise ValueError("high must be more than low")
        return high

    def read(self, reply: str, weights: Sequence[float]) -> float | None:
        """Return the score of a reply, or None where the judge abstains. Raises like `TokenVerdict.read`."""
        found = _last_object(reply)
        value = found.get(self.key, False)
        if value is None:
            return None
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not self.low <= value <= self.high
        ):
            raise UnreadableVerdictError(reply)
        return (value - self.low) / (self.high - self.low)


class PatternVerdict(_Reading):
    """The last line matches a pattern as a whole, whose first group is a number, which is scaled to [0, 1]."""

    kind: Literal["pattern"]
    pattern: str
    low: float
    high: float

    @field_validator("pattern")
    @classmethod
    def _with_a_group(cls, pattern: str) -> str:
        try:
            groups = re.compile(pattern).groups
        except re.error as error:
            raise ValueError(f"no regular expression: {error}") from error
        if groups != 1:
            raise ValueError("a pattern with one group is needed")
        return pattern

    def read(self, reply: str, weights: Sequence[float]) -> float | None:
        """Return the score of a reply. Raises like `TokenVerdict.read`."""
        lines = [line.strip(_AROUND) for line in strip_thinking(reply).splitlines() if line.strip(_AROUND)]
        match = re.fullmatch(self.pattern, lines[-1][:_LONGEST_LINE]) if lines else None
        try:
            value = float(match[1]) if match else math.nan
        except ValueError:
            value = math.nan
        if not self.low <= value <= self.high:
            raise UnreadableVerdictError(reply)
        return (value - self.low) / (self.high - self.low)


class CriteriaVerdict(_Reading):
    """The reply ends in a JSON object with a list that says of each criterion whether it is met."""

    kind: Literal["criteria"]
    key: str

    def read(self, reply: str, weights: Sequence[float]) -> float | None:
        """Return the weighted share of criteria that are met. Raises like `TokenVerdict.read`."""
        met = _last_object(reply).get(self.key)
        if (
            not isinstance(met, list)
            or len(met) != len(weights)
            or any(type(each) is not bool for each in met)
        ):
            raise UnreadableVerdictError(reply)
        return sum(weight for weight, each in zip(weights, met, strict=True) if each) / sum(weights)


Reading = Annotated[
    TokenVerdict | NumberVerdict | PatternVerdict | CriteriaVerdict, Field(discriminator="kind")
]


def _last_object(reply: str) -> dict[str, Any]:
    """Return the JSON object that a reply ends in, fenced or not."""
    text = strip_thinking(reply, ANSWER_WITHIN).strip().removesuffix("```").rstrip()
    decoder = json.JSONDecoder()
    start, left = text.find("{"), _MOST_READ
    while start >= 0 and left > 0:
        try:
            value, end = decoder.raw_decode(text, start)
        except json.JSONDecodeError as error:
            left -= max(1, error.pos - start)
            start = text.find("{", start + 1)
            continue
        except RecursionError:
            left -= len(text) - start
            start = text.find("{", start + 1)
            continue
        if end == len(text) and isinstance(value, dict):
            return value
        left -= end - start
        start = text.find("{", end)
    raise UnreadableVerdictError(reply)


_PLACE = re.compile(r"\{\{(\w+)\}\}")
_CANDIDATE = frozenset({"candidate", "first", "second"})


class Template(BaseModel):
    """What a judge is asked, and how its verdict is read.

    Attributes:
        fields: Fields that a task must have.
        optional: Fields that it may have; empty texts stand for those that are missing.
        swap: Whether the judge is asked twice, with candidate and reference in either order.
        system: The judge's instructions.
        user: What it judges.
        verdict: How its reply is read.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    fields: tuple[str, ...]
    optional: tuple[str, ...] = ()
    swap: bool = False
    system: str = Field(min_length=1)
    user: str = Field(min_length=1)
    verdict: Reading

    @model_validator(mode="after")
    def _places(self) -> "Template":
        places = set(_PLACE.findall(self.user))
        fields = {*self.fields, *self.optional}
        if self.swap and "reference" not in self.fields:
            raise ValueError("a template that swaps needs the field reference")
        wanted = fields - {"reference"} | {"first", "second"} if self.swap else fields | {"candidate"}
        if places != wanted:
            raise ValueError(f"`user` needs the places {', '.join(sorted(wanted))}, and no others")
        if set(_PLACE.findall(self.system)) != {"nonce"}:
            raise ValueError("`system` needs the place nonce, and no other: it tells data from instructions")
        return self

    @property
    def digest(self) -> str:
        """What tells it from other templates, whatever they are called."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()

    def messages(
        self, fields: Mapping[str, str], candidate: str, nonce: str, *, swapped: bool = False
    ) -> list[dict[str, str]]:
        """Return the messages to a judge.

        Args:
            fields: The task's, as text.
            candidate: The answer to judge.
            nonce: In the markers; the authors of the texts cannot know it.
            swapped: Whether the candidate comes second.
        """
        texts = {**dict.fromkeys(self.optional, ""), **fields, "candidate": candidate}
        if self.swap:
            pair = (texts["reference"], candidate) if swapped else (candidate, texts["reference"])
            texts |= dict(zip(("first", "second"), pair, strict=True))

        def fenced(place: re.Match[str]) -> str:
            name = "answer" if place[1] in _CANDIDATE else place[1]
            return f"<{name}-{nonce}>\n{texts[place[1]]}\n</{name}-{nonce}>"

        # In one pass: placeholders inside a text are not filled.
        return [
            {"role": "system", "content": _PLACE.sub(nonce, self.system)},
            {"role": "user", "content": _PLACE.sub(fenced, self.user)},
        ]


@cache
def shipped_templates() -> Mapping[str, Template]:
    """Return the templates that come with the project, by name."""
    text = resources.files(__package__).joinpath("templates.yaml").read_text(encoding="utf-8")
    return MappingProxyType(read_templates(text, "templates.yaml"))


def templates_of(file: str | None) -> Mapping[str, Template]:
    """Return the shipped templates and those of an operator's file, which win.

    Raises:
        ValueError: The file cannot be read, or is not what it should be.
    """
    if file is None:
        return shipped_templates()
    try:
        text = Path(expand_user(file)).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ValueError(f"templates_file cannot be read: {error}") from error
    return {**shipped_templates(), **read_templates(text, "templates_file")}


def read_templates(text: str, name: str) -> dict[str, Template]:
    """Read templates from YAML.

    Raises:
        ValueError: It is none, or a template is not what it should be.
    """
    try:
        found = read_yaml(text, name)
    except yaml.YAMLError as error:
        raise ValueError(f"{name} is no YAML: {error}") from error
    if not isinstance(found, Mapping):
        raise ValueError(f"{name} must map names to templates")
    templates = {}
    for key, value in found.items():
        try:
            templates[str(key)] = Template.model_validate(value)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise ValueError(f"template {key!r} of {name}: {where} {first['msg']}".strip()) from error
    return templates
