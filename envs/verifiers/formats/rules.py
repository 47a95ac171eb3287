"""The rules of form by their names: what each measures of a response, and how a task's rules are read and rated."""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal, NoReturn

from rollgym.clients.replies.marks import boxes, unfenced
from rollgym.clients.replies.thinking import strip_thinking
from rollgym.envs.core import patterns
from rollgym.envs.core.json_schemas import SchemaValidator
from rollgym.envs.verifiers.arguments import Reader, count, counts, flag, read_arguments, share, text
from rollgym.envs.verifiers.languages import SCRIPTS, script_shares

Unit = Literal["words", "characters", "tokens"]
_UNITS: tuple[Unit, ...] = ("words", "characters", "tokens")


class ReadReply:
    """One response.

    Args:
        raw: All of it.
        tokens: How many tokens it has, if the sampler reports it.
    """

    def __init__(self, raw: str, tokens: int | None = None) -> None:
        self.raw = raw
        self._tokens = tokens

    @cached_property
    def spoken(self) -> str:
        """What stands outside think tags, without space around it."""
        return strip_thinking(self.raw).strip()

    @cached_property
    def words(self) -> list[str]:
        """What stands between spaces, thinking included."""
        return self.raw.split()

    def length(self, unit: Unit) -> int:
        """Return how long it is, thinking included.

        Raises:
            ValueError: Tokens are asked for, and their number is unknown.
        """
        if unit == "characters":
            return len(self.raw)
        if unit == "words":
            return len(self.words)
        if self._tokens is None:
            raise ValueError("a length in tokens needs the task's field 'tokens': how many the response has")
        return self._tokens


Measure = Callable[..., float]
"""Rates a reply from 0 to 1, given the arguments of a rule."""


def unit(value: Any) -> Unit:
    """Read a unit of length."""
    for each in _UNITS:
        if value == each:
            return each
    raise ValueError(f"one of {', '.join(_UNITS)} is needed, not {value!r}")


_LONGEST_JSON = 200_000


def schema(value: Any) -> SchemaValidator:
    """Read a JSON Schema (2020-12)."""
    return SchemaValidator(value)


def json_schema(reply: ReadReply, schema: SchemaValidator) -> float:
    """Whether what is said, fenced or not, is JSON that a schema allows.

    Raises:
        TooMuchWorkError: Holding one against the other takes too much work.
    """
    if len(reply.spoken) > _LONGEST_JSON:
        return 0.0
    try:
        value = json.loads(unfenced(reply.spoken), parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return 0.0
    return float(schema.fits(value))


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_WORD = re.compile(r"\w+")


def length_within(reply: ReadReply, most: int, least: int = 0, unit: Unit = "words") -> float:
    """Whether the length is in a range."""
    return float(least <= reply.length(unit) <= most)


def length_target(
    reply: ReadReply, target: int, per_unit: float | None = None, unit: Unit = "words"
) -> float:
    """1 - per_unit * |length - target|, no less than 0; `per_unit` is 1 / target if it is not said.

    LCPO-Exact of L1 (Aggarwal and Welleck 2025, arXiv:2503.04697), with its alpha = 0.0003 for tokens.
    """
    slope = 1 / max(1, target) if per_unit is None else per_unit
    return max(0.0, 1.0 - slope * abs(reply.length(unit) - target))


def length_cosine(reply: ReadReply, most: int, floor: float = 0.0, unit: Unit = "words") -> float:
    """floor + (1 - floor) * (1 + cos(pi * min(length, most) / most)) / 2: from 1 at no length to the floor at most.

    The cosine reward for right answers (Yeo et al. 2025, arXiv:2502.03373).
    """
    progress = min(reply.length(unit), most) / max(1, most)
    return floor + (1.0 - floor) * (1.0 + math.cos(math.pi * progress)) / 2.0


def overlong(reply: ReadReply, most: int, buffer: int, unit: Unit = "words") -> float:
    """1 up to most - buffer, then linearly down to 0 at most.

    1 plus the soft overlong punishment of DAPO (Yu et al. 2025, arXiv:2503.14476, equation 13).
    """
    over = reply.length(unit) - (most - buffer)
    if over <= 0:
        return 1.0
    return max(0.0, 1.0 - over / buffer) if buffer else 0.0


def repetition(reply: ReadReply, n: int = 3, penalty: float = 1.0, least: float | None = None) -> float:
    """1 - penalty * (1 - distinct n-grams / n-grams) of words in lower case; with `least`, whether it is at least that.

    The repetition penalty of Yeo et al. 2025 (arXiv:2502.03373, appendix) as open-r1 has it.
    """
    words = _WORD.findall(reply.raw.lower())
    grams = Counter(zip(*(words[start:] for start in range(n)), strict=False))
    rating = 1.0 - penalty * (1.0 - len(grams) / grams.total()) if grams else 1.0
    return rating if least is None else float(rating >= least)


def long_block(reply: ReadReply, most: int = 100) -> float:
    """Whether nothing longer than this stands without a space (ROLL's penalty for long blocks)."""
    return float(all(len(word) <= most for word in reply.words))


def script(reply: ReadReply, script: str, least: float | None = None) -> float:
    """The share of letters that are of a script; whether it is large enough, where `least` is said.

    Language consistency as a share of the target language (DeepSeek-R1, arXiv:2501.12948, 2.3.2), by letters. A reply
    without letters has a share of 0.
    """
    share = script_shares(reply.raw).get(script, 0.0)
    return share if least is None else float(share >= least)


def think_answer(reply: ReadReply, think: str = "think", answer: str = "answer") -> float:
    """Whether the reply is `<think>...</think>` and then `<answer>...</answer>`, each once, and nothing else.

    The format reward of DeepSeek-R1 (arXiv:2501.12948, 2.2.2). Neither part may be blank.
    """
    tags = (f"<{think}>", f"</{think}>", f"<{answer}>", f"</{answer}>")
    if any(reply.raw.count(tag) != 1 for tag in tags):
        return 0.0
    opened, closed, begun, ended = (reply.raw.index(tag) for tag in tags)
    outside = (
        reply.raw[:opened] + reply.raw[closed + len(tags[1]) : begun] + reply.raw[ended + len(tags[3]) :]
        if opened < closed < begun < ended
        else "x"
    )
    if outside.strip():
        return 0.0
    parts = (reply.raw[opened + len(tags[0]) : closed], reply.raw[begun + len(tags[2]) : ended])
    return float(all(part.strip() for part in parts))


def tag_counts(reply: ReadReply, tags: Mapping[str, int]) -> float:
    """The share of tags that occur exactly as often as they should (open-r1's tag count reward: 1/4 for each of 4)."""
    return sum(reply.raw.count(tag) == times for tag, times in tags.items()) / len(tags)


def single_boxed(reply: ReadReply) -> float:
    r"""Whether there is exactly one `\boxed{...}` outside of thinking, with something in it."""
    found, opened = boxes(reply.spoken)
    return float(opened == 1 and len(found) == 1 and bool(found[0].content.strip()))


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


def _regex(reply: ReadReply, pattern: str, whole: bool = False) -> float:
    """Whether what is said has a pattern in it, or is one as a whole."""
    found = patterns.matches if whole else patterns.searches
    return float(found(pattern, reply.spoken))


def _exact(reply: ReadReply, text: str) -> float:
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
        "think_answer": _rule(think_answer, {}, think=text, answer=text),
        "tag_counts": _rule(tag_counts, {"tags": counts}),
        "single_boxed": _rule(single_boxed, {}),
        "json_schema": _rule(json_schema, {"schema": schema}),
        "regex": _rule(_regex, {"pattern": _pattern}, whole=flag),
        "exact": _rule(_exact, {"text": text}),
        "length_within": _rule(length_within, {"most": count}, least=count, unit=unit),
        "length_target": _rule(length_target, {"target": count}, per_unit=share, unit=unit),
        "length_cosine": _rule(length_cosine, {"most": _positive}, floor=share, unit=unit),
        "overlong": _rule(overlong, {"most": count, "buffer": count}, unit=unit),
        "repetition": _rule(repetition, {}, n=_gram, penalty=share, least=share),
        "long_block": _rule(long_block, {}, most=_positive),
        "script": _rule(script, {"script": _script}, least=share),
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


def rate(reply: ReadReply, rules: Sequence[Wanted]) -> list[float]:
    """Return how well a reply keeps each rule, from 0 to 1.

    Raises:
        ValueError: A rule cannot be held against it.
        TooMuchWorkError: One takes too long.
    """
    return [RULES[each.name].rate(reply, **each.arguments) for each in rules]
