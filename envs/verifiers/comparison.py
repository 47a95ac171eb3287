"""Whether two answers are equal, as far as exact arithmetic and their form tell: no search, no guessing."""

import re
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from math import isfinite
from typing import Literal

from envs.verifiers.affordable import depth
from envs.verifiers.composed_numbers import ComposedNumber, read_composed, same_composed
from envs.verifiers.exact import NotExact, Value, approximate, decimals, rational, read_value
from envs.verifiers.latex import canonical, plain, words

Reason = Literal[
    "equal_numbers",
    "equal_percent",
    "equal_rounded",
    "equal_parts",
    "equal_composed",
    "equal_text",
    "different_numbers",
    "different_parts",
    "different_composed",
    "different_words",
    "different_kinds",
    "undecided",
]
_PERCENT_ASKED = re.compile(r"per\s?cent|%", re.IGNORECASE)
_SCALE_ASKED = re.compile(r"\b(?:hundred|thousand|million|billion|trillion)s?\b", re.IGNORECASE)
_LONGEST = 2000
_KEPT = 1024
_CONSTANTS = frozenset({"e", "i", "inf", "infinity", "infty"})
# "1,22" is one number where commas are decimal signs, and two elsewhere.
_DECIMAL_COMMA = re.compile(r"[-+]?\d+,\d+")
# Possessive, and from the beginning of a run of blanks alone: a run is looked at once.
_BETWEEN = re.compile(
    r"(?<![,\s])[,\s]++(?<=\s)(?:or|and)\s++|(?<!\s)\s*+,?\s*+\\text\{\s*+(?:or|and)\s*+\}\s*+"
)
_DEEPEST = 40
_NAME = re.compile(
    r"\\?[a-zA-Z]{1,12}'*(?:_(?:\w|\{\w{1,5}\}))?(?:\s?\([^()=+*/^-]{0,20}\))?(?:\s+[A-Z]{1,4})?"
)
_APPROXIMATELY = re.compile(r"\\(?:approx|simeq|doteq)(?![a-zA-Z])|≈")
_NOT_EQUAL = re.compile(r"\\(?:neq?|leq?|geq?|not)(?![a-zA-Z])|[!<>:=]=|[≠<>≤≥]|\\pm")
_DENIAL = re.compile(r"(?:\\?[a-zA-Z]\w?)?\s*(?:\\neq?(?![a-zA-Z])|\\not\s*=|!=|≠)\s*(.+)", re.DOTALL)
# An inequality around a letter, or before a number.
_RELATION = re.compile(r"\\(?:neq?|leqslant|geqslant|leq?|geq?|lt|gt)(?![a-zA-Z])|!=|[≠<>≤≥]")
_MATRIX = re.compile(
    r"(?:(?:\\left)?\s*[(\[]\s*)?\\begin\s*\{(?P<kind>(?:[pbB]|small|psmall|bsmall)?matrix\*?|array)\}"
    r"(?:\s*(?:\[[^\]]*\]|\{[^{}]*\}))?(?P<body>.*)\\end\s*\{(?P=kind)\}(?:\s*(?:\\right)?\s*[)\]])?",
    re.DOTALL,
)
_ROW_END = re.compile(r"\\\\(?:\s*\[[^\]]*\])?|\\cr(?![a-zA-Z])")
_CASES = re.compile(
    r"(?:\\left\s*\\\{\s*)?\\begin\s*\{cases\}(?P<body>[^&]*)\\end\s*\{cases\}(?:\s*\\right\s*\.)?", re.DOTALL
)
_NAMED = re.compile(r"\s*(\\?[a-zA-Z]{1,12}(?:_(?:\w|\{\w{1,5}\}))?)\s*=(?!=)")
_TUPLE_OF_NAMES = re.compile(r"\((?P<names>[^()=]+)\)\s*=\s*\((?P<values>.+)\)", re.DOTALL)
_EITHER_SIGN = re.compile(r"\\pm(?![a-zA-Z])|±")
_OPENING = {"(": "(", "[": "[", "\\{": "{", "{": "{"}
_CLOSING = (")", "]", "\\}", "}")


@dataclass(frozen=True, slots=True)
class Comparison:
    """What the form of two answers tells.

    Attributes:
        equal: None where it does not tell.
        reason: Why.
    """

    equal: bool | None
    reason: Reason


UNDECIDED = Comparison(None, "undecided")


@dataclass(frozen=True, slots=True)
class _Answer:
    """An answer read as far as it can be: a number, a list of them, a matrix, what it is not, words, or mere text."""

    text: str
    percent: bool
    value: Value | None = None
    parts: tuple["_Answer", ...] = ()
    brackets: str = ""
    said: str | None = None
    places: int | None = None
    rows: tuple[tuple["_Answer", ...], ...] = ()
    denied: "_Answer | None" = None
    relation: bool = False
    name: str | None = None
    composed: ComposedNumber | None = None
    scale: int = 1


@dataclass(frozen=True, slots=True)
class Asked:
    """What a question asks for, as far as it bears on what a number means; None where the question is not known.

    Attributes:
        percent: Whether for a percentage, in which case `5%` answers it as `5` does.
        scale: Whether for thousands, millions or the like, in which case `5 million` answers it as `5` does.
    """

    percent: bool | None = None
    scale: bool | None = None


_UNKNOWN = Asked()


def asked_of(question: object) -> Asked:
    """Return what a question asks for; what is no text is not known."""
    if not isinstance(question, str):
        return _UNKNOWN
    return Asked(_PERCENT_ASKED.search(question) is not None, _SCALE_ASKED.search(question) is not None)


def compare(gold: str, answer: str, *, rounding: int = 6, asked: Asked = _UNKNOWN) -> Comparison:
    """Compare an answer with the reference.

    Args:
        gold: The reference.
        answer: What stands where the answer is given.
        rounding: A decimal number with at least so many places may be the rounded value of one without an end.
        asked: What the question asks for.
    """
    if len(gold) > _LONGEST or len(answer) > _LONGEST:
        return UNDECIDED
    if gold == answer and answer.isdigit():
        return Comparison(True, "equal_numbers")
    if _is_deep(gold) or _is_deep(answer):
        return UNDECIDED
    return _compare(_read_reference(gold), _read(answer), rounding, asked)


def _is_deep(text: str) -> bool:
    return len(text) > _DEEPEST and depth(text) > _DEEPEST


def is_exact(reference: str) -> bool:
    """Whether a reference is a number, a list or matrix of them, or words: what is compared without a search."""
    if len(reference) > _LONGEST or _is_deep(reference):
        return False
    return _is_exact(_read_reference(reference))


def _is_exact(answer: _Answer) -> bool:
    inner = [*answer.parts, *(entry for row in answer.rows for entry in row)]
    if answer.denied is not None:
        return _is_exact(answer.denied)
    if inner:
        return all(map(_is_exact, inner))
    return answer.value is not None or (answer.said is not None and len(answer.said) > 3)


def _compare(gold: _Answer, answer: _Answer, rounding: int, asked: Asked) -> Comparison:
    if gold.value is not None and answer.value is not None:
        return _compare_numbers(gold, answer, rounding, asked)
    if gold.composed is not None and answer.composed is not None:
        equal = same_composed(gold.composed, answer.composed)
        return Comparison(equal, "equal_composed" if equal else "different_composed")
    if gold.said is not None and answer.said is not None:
        if gold.said == answer.said:
            return Comparison(True, "equal_text")
        # Short ones may be products of variables.
        long = min(len(gold.said), len(answer.said)) > 3
        return Comparison(False, "different_words") if long else UNDECIDED
    if gold.text and gold.percent == answer.percent and canonical(gold.text) == canonical(answer.text):
        return Comparison(True, "equal_text")
    if gold.rows and answer.rows:
        return _compare_matrices(gold, answer, rounding)
    if gold.denied is not None and answer.denied is not None:
        return _compare(gold.denied, answer.denied, rounding, asked)
    if gold.parts and not answer.parts and _DECIMAL_COMMA.fullmatch(answer.text) is not None:
        # Beside a list, "8,6" is one.
        answer = replace(answer, parts=tuple(map(_read, answer.text.split(","))))
    if gold.parts and answer.parts:
        return _compare_parts(gold, answer, rounding)
    if _kinds_differ(gold, answer) or _kinds_differ(answer, gold):
        return Comparison(False, "different_kinds")
    return UNDECIDED


def _kinds_differ(one: _Answer, other: _Answer) -> bool:
    """Whether one is a number (or a list of them) and it is sure that the other is none, whatever it stands for."""
    if other.denied is not None or other.relation:
        # What an answer is not, or lies above, is no answer.
        return one.value is not None
    if other.composed is not None and other.composed.kind != "base":
        return one.value is not None
    if other.rows:
        return one.value is not None and (len(other.rows) > 1 or len(other.rows[0]) > 1)
    if other.said is not None:
        exact = one.value is not None or (one.parts and all(part.value is not None for part in one.parts))
        return bool(exact) and other.said not in _CONSTANTS
    return (
        one.value is not None and len(other.parts) > 1 and any(part.value is not None for part in other.parts)
    )


def _compare_numbers(gold: _Answer, answer: _Answer, rounding: int, asked: Asked) -> Comparison:
    assert gold.value is not None
    assert answer.value is not None
    if gold.scale != answer.scale:
        scaled = _scaled(gold.value, Fraction(gold.scale)) == _scaled(answer.value, Fraction(answer.scale))
        # "5 million" for 5 is right where millions were asked for, and a million times too large anywhere else.
        equal = scaled or (asked.scale is not False and gold.value == answer.value)
        return Comparison(equal, "equal_numbers" if equal else "different_numbers")
    if gold.percent == answer.percent or (gold.percent and not answer.percent):
        if gold.value == answer.value:
            return Comparison(True, "equal_numbers" if gold.percent == answer.percent else "equal_percent")
        if _rounds_to(gold, answer, rounding):
            return Comparison(True, "equal_rounded")
    hundredth = Fraction(1, 100)
    if gold.percent and not answer.percent and _scaled(gold.value, hundredth) == answer.value:
        return Comparison(True, "equal_percent")
    if answer.percent and not gold.percent:
        if _scaled(answer.value, hundredth) == gold.value:
            return Comparison(True, "equal_percent")
        # "5%" for 5 is right where a percentage was asked for, and a hundred times too small anywhere else.
        if asked.percent is not False and gold.value == answer.value:
            return Comparison(True, "equal_percent")
    return Comparison(False, "different_numbers")


def _rounds_to(gold: _Answer, answer: _Answer, rounding: int) -> bool:
    """Whether one is a decimal number and the other's rounded value."""
    assert gold.value is not None
    assert answer.value is not None
    for decimal, other in ((answer, gold), (gold, answer)):
        if decimal.places is None or decimal.places < rounding:
            continue
        number = rational(decimal.value or {})
        exact = rational(other.value or {})
        if number is None or (exact is not None and _ends(exact)):
            continue
        if exact is not None:
            near = abs(exact - number) <= Fraction(1, 2 * 10 ** min(decimal.places, 15))
        else:
            written = approximate(decimal.value or {})
            # Too large for a float, it is not near to anything.
            near = isfinite(written) and abs(approximate(other.value or {}) - written) <= 0.51 * 10.0 ** -min(
                decimal.places, 12
            ) * max(1.0, abs(written) * 1e-3)
        if near:
            return True
    return False


def _ends(number: Fraction) -> bool:
    """Whether a number has an end in decimals."""
    denominator = number.denominator
    for prime in (2, 5):
        while denominator % prime == 0:
            denominator //= prime
    return denominator == 1


def _scaled(value: Value, factor: Fraction) -> Value:
    return {key: coefficient * factor for key, coefficient in value.items()}


def _compare_parts(gold: _Answer, answer: _Answer, rounding: int) -> Comparison:
    if (
        gold.brackets in ("()", "[]", "[)", "(]")
        and not answer.brackets
        and any(p.brackets for p in answer.parts)
    ):
        # One point, or one interval, and a list that has such among others.
        return Comparison(False, "different_kinds")
    if gold.brackets != answer.brackets:
        # A list may be said with brackets or without; what brackets mean beyond that is not for arithmetic to say.
        return UNDECIDED
    exact = all(part.value is not None for part in (*gold.parts, *answer.parts))
    if len(gold.parts) != len(answer.parts):
        return Comparison(False, "different_parts") if exact and gold.brackets != "{}" else UNDECIDED
    if gold.brackets in ("{}", ""):
        if (names := _names(gold)) is not None and (others := _names(answer)) is not None:
            return _compare_named(
                dict(zip(names, gold.parts, strict=True)),
                dict(zip(others, answer.parts, strict=True)),
                rounding,
            )
        left = list(answer.parts)
        for part in gold.parts:
            match = next((each for each in left if _compare(part, each, rounding, _UNKNOWN).equal), None)
            if match is None:
                return UNDECIDED
            left.remove(match)
        return Comparison(True, "equal_parts")
    found = [
        _compare(one, other, rounding, _UNKNOWN) for one, other in zip(gold.parts, answer.parts, strict=True)
    ]
    if all(each.equal for each in found):
        return Comparison(True, "equal_parts")
    if exact and any(each.equal is False for each in found):
        return Comparison(False, "different_parts")
    return UNDECIDED


def _compare_named(gold: dict[str, _Answer], answer: dict[str, _Answer], rounding: int) -> Comparison:
    if gold.keys() != answer.keys():
        return UNDECIDED
    found = [_compare(part, answer[name], rounding, _UNKNOWN).equal for name, part in gold.items()]
    if all(found):
        return Comparison(True, "equal_parts")
    return Comparison(False, "different_parts") if False in found else UNDECIDED


def _compare_matrices(gold: _Answer, answer: _Answer, rounding: int) -> Comparison:
    """Compare entry by entry; what brackets stand around a matrix means nothing."""
    if [len(row) for row in gold.rows] != [len(row) for row in answer.rows]:
        # A row may be said for a column.
        vectors = all(len(each) == 1 or len(each[0]) == 1 for each in (gold.rows, answer.rows))
        return UNDECIDED if vectors else Comparison(False, "different_parts")
    found = [
        _compare(one, other, rounding, _UNKNOWN).equal
        for ours, theirs in zip(gold.rows, answer.rows, strict=True)
        for one, other in zip(ours, theirs, strict=True)
    ]
    if all(found):
        return Comparison(True, "equal_parts")
    return Comparison(False, "different_parts") if False in found else UNDECIDED


def _read(answer: str) -> _Answer:
    try:
        # Most answers: there is nothing to take away from them.
        return _Answer(answer, False, value=read_value(answer), places=decimals(answer))
    except NotExact:
        pass
    read = _read_form(answer)
    composed = None if read.value is not None else read_composed(answer)
    return read if composed is None else replace(read, composed=composed)


def _read_form(answer: str) -> _Answer:
    if "\\begin" in answer:
        if rows := _matrix(answer):
            return _Answer(answer, False, rows=rows)
        if (cases := _CASES.fullmatch(answer.strip().strip("$.").strip())) is not None:
            answer = ", ".join(
                row.strip().rstrip(",") for row in _ROW_END.split(cases["body"]) if row.strip()
            )
    form = plain(answer)
    text = form.text
    try:
        return _Answer(text, form.percent, value=read_value(text), places=decimals(text), scale=form.scale)
    except NotExact:
        pass
    if (values := both_signs(text)) != text:
        return _read(values)
    denial = _DENIAL.fullmatch(text)
    if denial is not None:
        return _Answer(text, form.percent, denied=_read(denial[1]))
    if "=" in text and (named := _named_tuple(text)):
        return _Answer(text, form.percent, parts=named)
    if "=" in text and (side := _last_side(text)) is not None:
        return _read(side)
    said = words(text)
    if said is not None:
        return _Answer(text, form.percent, said=said)
    brackets, inner = _unbracketed(text)
    parts = [text] if not brackets and _DECIMAL_COMMA.fullmatch(text) else _split(inner)
    if len(parts) > 1 or (brackets == "{}" and inner):
        return _Answer(text, form.percent, parts=_named_parts(answer, parts), brackets=brackets)
    return _Answer(text, form.percent, relation=_RELATION.search(text) is not None)


def _named_parts(answer: str, parts: list[str]) -> tuple[_Answer, ...]:
    """Read the parts of a list, each with the name that it is given, as in `x = 1, y = 2`."""
    # The first name stands before the whole list, too, and is taken away with what means nothing.
    named = [_NAMED.match(answer if number == 0 else part) for number, part in enumerate(parts)]
    return tuple(
        replace(_read(part), name=None if name is None else name[1])
        for part, name in zip(parts, named, strict=True)
    )


def _named_tuple(text: str) -> tuple[_Answer, ...]:
    """Read `(x, y) = (1, 2)` as `x = 1, y = 2`; nothing if a text is no such equation."""
    match = _TUPLE_OF_NAMES.fullmatch(text)
    if match is None or not _encloses(text, match.start("values"), match.end("values")):
        return ()
    names, values = _split(match["names"]), _split(match["values"])
    if len(names) != len(values) or len(names) < 2 or not all(map(_NAME.fullmatch, names)):
        return ()
    return tuple(replace(_read(value), name=name) for name, value in zip(names, values, strict=True))


def _names(answer: _Answer) -> list[str] | None:
    """Return the names of the parts of a list if each has one of its own: they say what is equal to what."""
    names = [part.name for part in answer.parts if part.name is not None]
    return names if len(set(names)) == len(answer.parts) > 1 else None


def _matrix(text: str) -> tuple[tuple[_Answer, ...], ...]:
    """Return the rows of a matrix; nothing if a text is more than one, or none."""
    match = _MATRIX.fullmatch(text.strip().strip("$.").strip())
    if match is None or "\\begin" in match["body"]:
        return ()
    rows = [row.strip() for row in _ROW_END.split(match["body"])]
    while rows and not rows[-1]:
        rows.pop()
    return tuple(tuple(_read(entry.strip()) for entry in row.split("&")) for row in rows)


def _last_side(text: str) -> str | None:
    """Return what a chain of equalities comes to: its last side, where all behind the first are numbers.

    The first may be a name, or a number that is worked out; an equation in which something is unknown is no chain. What
    a side is about equal to is no side.
    """
    if _NOT_EQUAL.search(text) is not None:
        return None
    first, *others = _APPROXIMATELY.split(text, maxsplit=1)[0].split("=")
    if not others or not all(map(_is_number, others)):
        return None
    return others[-1].strip() if _NAME.fullmatch(first.strip()) or _is_number(first) else None


def _is_number(text: str) -> bool:
    try:
        read_value(plain(text).text)
    except NotExact:
        return False
    return True


# A reference is compared with the responses of a whole group, and again in later passes.
_read_reference = lru_cache(maxsize=_KEPT)(_read)


def _unbracketed(text: str) -> tuple[str, str]:
    """Return the brackets around a whole text, and what is within."""
    for opening, sign in _OPENING.items():
        if text.startswith(opening):
            for closing in _CLOSING:
                if text.endswith(closing) and _encloses(text, len(opening), len(text) - len(closing)):
                    return sign + closing[-1], text[len(opening) : -len(closing)].strip()
    return "", text


def both_signs(text: str) -> str:
    r"""Return the two values that a text with one `\pm` stands for, as a list; the text itself where that is not plain.

    `\frac{1 \pm \sqrt{5}}{2}` is `\frac{1 + \sqrt{5}}{2}, \frac{1 - \sqrt{5}}{2}`.
    """
    if _EITHER_SIGN.search(text) is None or "\\mp" in text:
        return text
    form = plain(text).text
    brackets, inner = _unbracketed(form)
    parts = _split(inner if brackets == "{}" else form)
    if any(len(_EITHER_SIGN.findall(part)) > 1 for part in parts):
        return text
    # The plus of a number that begins with it means nothing.
    signs = (("(?:^|(?<=[({]))" + _EITHER_SIGN.pattern, ""), (_EITHER_SIGN.pattern, "+"))
    values: list[str] = []
    for part in parts:
        if _EITHER_SIGN.search(part) is None:
            values.append(part)
            continue
        plus = part
        for pattern, sign in signs:
            plus = re.sub(pattern, sign, plus)
        values += [plus, _EITHER_SIGN.sub("-", part)]
    return ", ".join(values)


def _encloses(text: str, start: int, end: int) -> bool:
    """Whether the brackets before `start` and from `end` on belong together."""
    if end < start:
        return False
    depth = 0
    for character in text[start:end]:
        depth += (character in "([{") - (character in ")]}")
        if depth < 0:
            return False
    return depth == 0


def _split(text: str) -> list[str]:
    """Split at the commas (or semicolons) that stand within no brackets.

    Words such as "and" separate, too.
    """
    pieces = _BETWEEN.split(text)
    if len(pieces) > 1 and all(pieces):
        return [part for piece in pieces for part in _split(piece)]
    sign = ";" if ";" in text else ","
    parts, depth, start = [], 0, 0
    for place, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if character == sign and depth == 0:
            parts.append(text[start:place].strip())
            start = place + 1
    parts.append(text[start:].strip())
    return parts if all(parts) else [text]
