"""All rules of form by their names, read from a task and held against a response."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from envs.verifiers import patterns
from envs.verifiers.arguments import Reader, count, counts, flag, read_arguments, share, text
from envs.verifiers.formats import schemas, shaping, structure
from envs.verifiers.formats.reply import Measure, Reply, unit
from envs.verifiers.languages import SCRIPTS

_MOST = 32
_HEAVIEST = 1000.0
_LONGEST_GRAM = 16


def _pattern(value: Any) -> str:
    pattern = text(value)
    patterns.check_pattern(pattern)
    return pattern


def _positive(value: Any) -> int:
    if count(value) < 1:
        raise ValueError(f"a number from 1 is needed, not {value!r}")
    return int(value)


def _gram(value: Any) -> int:
    if not 1 <= count(value) <= _LONGEST_GRAM:
        raise ValueError(f"a number from 1 to {_LONGEST_GRAM} is needed, not {value!r}")
    return int(value)


def _script(value: Any) -> str:
    if value not in SCRIPTS:
        raise ValueError(f"one of {', '.join(SCRIPTS)} is needed, not {value!r}")
    return str(value)


def _regex(reply: Reply, pattern: str, whole: bool = False) -> float:
    """Whether what is said has a pattern in it, or is one as a whole."""
    found = patterns.matches if whole else patterns.searches
    return float(found(pattern, reply.spoken))


def _exact(reply: Reply, text: str) -> float:
    """Whether what is said is a text, space around both aside."""
    return float(reply.spoken == text.strip())


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule of form.

    Attributes:
        rate: Rates a reply from 0 to 1.
        arguments: How each argument is read.
        optional: Arguments that need not be said.
    """

    rate: Measure
    arguments: Mapping[str, Reader] = field(default_factory=dict)
    optional: frozenset[str] = frozenset()


def _rule(rate: Measure, needed: Mapping[str, Reader], **optional: Reader) -> Rule:
    return Rule(rate, {**needed, **optional}, frozenset(optional))


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "think_answer": _rule(structure.think_answer, {}, think=text, answer=text),
        "tag_counts": _rule(structure.tag_counts, {"tags": counts}),
        "single_boxed": _rule(structure.single_boxed, {}),
        "json_schema": _rule(schemas.json_schema, {"schema": schemas.schema}),
        "regex": _rule(_regex, {"pattern": _pattern}, whole=flag),
        "exact": _rule(_exact, {"text": text}),
        "length_within": _rule(shaping.length_within, {"most": count}, least=count, unit=unit),
        "length_target": _rule(shaping.length_target, {"target": count}, per_unit=share, unit=unit),
        "length_cosine": _rule(shaping.length_cosine, {"most": _positive}, floor=share, unit=unit),
        "overlong": _rule(shaping.overlong, {"most": count, "buffer": count}, unit=unit),
        "repetition": _rule(shaping.repetition, {}, n=_gram, penalty=share, least=share),
        "long_block": _rule(shaping.long_block, {}, most=_positive),
        "script": _rule(shaping.script, {"script": _script}, least=share),
    }
)
"""The rules."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """One rule of a task.

    Attributes:
        name: The rule.
        arguments: What it says beside that.
        weight: What it counts for in a mean.
    """

    name: str
    arguments: Mapping[str, Any]
    weight: float


def read_rules(value: Any) -> list[Wanted]:
    """Return the rules of a task.

    Raises:
        ValueError: There are none, one is not known, or its arguments make no sense.
    """
    if not isinstance(value, Sequence) or isinstance(value, str) or not 1 <= len(value) <= _MOST:
        raise ValueError(f"a task needs the field 'rules': a list of 1 to {_MOST} rules")
    return [_read(each) for each in value]


def _read(given: Any) -> Wanted:
    if not isinstance(given, Mapping):
        raise ValueError("a rule is a mapping, such as {'rule': 'single_boxed'}")
    said = dict(given)
    name, weight = said.pop("rule", None), said.pop("weight", 1.0)
    if not isinstance(name, str) or name not in RULES:
        raise ValueError(f"there is no rule {str(name)[:80]!r}; there are {', '.join(RULES)}")
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight <= _HEAVIEST:
        raise ValueError(f"the weight of {name} must be over 0 and at most {_HEAVIEST:g}, not {weight!r}")
    rule = RULES[name]
    return Wanted(name, read_arguments(name, said, rule.arguments, rule.optional), float(weight))


def rate(reply: Reply, rules: Sequence[Wanted]) -> list[float]:
    """Return how well a reply keeps each rule, from 0 to 1.

    Raises:
        ValueError: A rule cannot be held against it.
        TooMuchWorkError: One takes too long.
    """
    return [RULES[each.name].rate(reply, **each.arguments) for each in rules]
