"""How a judge's reply is read: strictly, at its end, and never by what it merely mentions."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from rollgym.clients.replies.marks import ANSWER_WITHIN
from rollgym.clients.replies.thinking import strip_thinking

_AROUND = " \t*_`.\"'"
_LONGEST_SHOWN = 120
_LONGEST_LINE = 1_000
_MOST_OBJECTS = 1_000


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
            UnreadableVerdictError: There is no verdict.
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
    start = text.find("{")
    for _ in range(_MOST_OBJECTS):
        if start < 0:
            break
        try:
            value, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            start = text.find("{", start + 1)
            continue
        if end == len(text) and isinstance(value, dict):
            return value
        start = text.find("{", end)
    raise UnreadableVerdictError(reply)
