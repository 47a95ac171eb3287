"""Whether two answers are equal, as far as exact arithmetic and their form tell: no search, no guessing."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import isfinite
from typing import Literal

from rollgym.envs.verifiers.answers import Answer, read_answer, read_reference
from rollgym.envs.verifiers.exact import approximate, divide, multiply, rational, scale
from rollgym.envs.verifiers.latex import SHORT_WORDS, canonical, figure, formula, unwrapped
from rollgym.envs.verifiers.numerals import is_in_base, same_composed
from rollgym.envs.verifiers.symbolic import depth
from rollgym.envs.verifiers.units import contradict, in_kelvin, unit_of

Reason = Literal[
    "equal_numbers",
    "equal_percent",
    "equal_rounded",
    "equal_quantities",
    "equal_parts",
    "equal_composed",
    "equal_text",
    "different_numbers",
    "different_parts",
    "different_composed",
    "different_units",
    "different_words",
    "different_kinds",
    "undecided",
]
_PERCENT_ASKED = re.compile(r"per\s?cent|%", re.IGNORECASE)
_SCALE_ASKED = re.compile(r"\b(?:dozen|hundred|thousand|million|billion|trillion)s?\b", re.IGNORECASE)
# Marks of a derivative, a transpose, a conjugate or a complement.
_PRIME = re.compile(
    r"\^\s*\{?\s*(?:(?:\\(?:prime|top|intercal|dagger|ast|complement))(?![a-zA-Z])|[TcC*])\s*\}?|′"
)
_GREEK = re.compile(
    r"\\(?:gamma|delta|theta|lambda|xi|pi|sigma|upsilon|phi|psi|omega)(?![a-zA-Z])", re.IGNORECASE
)
_AND, _OR = re.compile(r"\band\b|\\land(?![a-z])"), re.compile(r"\bor\b|\\lor(?![a-z])")
_PRIMED = re.compile(r"(?<=[A-Za-z)}])'+(?![a-zA-Z])")
_LONGEST = 2000
_LONGEST_PRODUCT = 3
_CONSTANTS = frozenset({"e", "i", "inf", "infinity", "infty"})
_DEEPEST = 40
# Of a number that is rounded to so many places, at least these say something.
_FEWEST_DIGITS = 3


@dataclass(frozen=True, slots=True)
class Comparison:
    """What the form of two answers tells.

    Attributes:
        equal: None if undecided.
        reason: Why.
    """

    equal: bool | None
    reason: Reason


UNDECIDED = Comparison(None, "undecided")


@dataclass(frozen=True, slots=True)
class QuestionContext:
    """What a question asks for, as far as it bears on what a number means; None where the question is not known.

    Attributes:
        percent: Whether for a percentage, in which case `5%` answers it as `5` does.
        scale: Whether for thousands, millions or the like, in which case `5 million` answers it as `5` does.
    """

    percent: bool | None = None
    scale: bool | None = None


_UNKNOWN = QuestionContext()


def asked_of(question: object) -> QuestionContext:
    """Return what a question asks for; only texts are read."""
    if not isinstance(question, str):
        return _UNKNOWN
    return QuestionContext(
        _PERCENT_ASKED.search(question) is not None, _SCALE_ASKED.search(question) is not None
    )


def compare(gold: str, answer: str, *, rounding: int = 6, asked: QuestionContext = _UNKNOWN) -> Comparison:
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
    return _compare(read_reference(gold), read_answer(answer), rounding, asked)


def _is_deep(text: str) -> bool:
    return len(text) > _DEEPEST and depth(text) > _DEEPEST


def is_exact(reference: str) -> bool:
    """Whether a reference is a number, a list or matrix of them, or words: what is compared without a search."""
    if len(reference) > _LONGEST or _is_deep(reference):
        return False
    return read_reference(reference).is_exact


def _compare(gold: Answer, answer: Answer, rounding: int, asked: QuestionContext) -> Comparison:
    if (measured := _compare_quantities(gold, answer, rounding)) is not None:
        return measured
    if gold.value is not None and answer.value is not None:
        return _compare_numbers(gold, answer, rounding, asked)
    if gold.composed is not None and answer.composed is not None:
        equal = same_composed(gold.composed, answer.composed)
        return Comparison(equal, "equal_composed" if equal else "different_composed")
    if gold.said is not None and answer.said is not None:
        if gold.said == answer.said and _is_cased_alike(gold, answer):
            return Comparison(True, "equal_text")
        if gold.said == answer.said:
            return Comparison(False, "different_words")
        # Short ones may be products of variables.
        long = min(len(gold.said), len(answer.said)) > _LONGEST_PRODUCT
        named = gold.is_name or answer.is_name or len(gold.said) == len(answer.said) == 1
        return Comparison(False, "different_words") if long or named else UNDECIDED
    if gold.text and gold.percent == answer.percent and canonical(gold.text) == canonical(answer.text):
        differ = contradict(gold.unit, answer.unit)
        return Comparison(False, "different_units") if differ else Comparison(True, "equal_text")
    figures = figure(gold.text, answer.text), figure(answer.text, gold.text)
    if figures[0] is not None and figures[1] is not None:
        same = figures[0] == figures[1]
        return Comparison(same, "equal_text" if same else "different_words")
    if (indexed := formula(gold.text)) is not None and indexed == formula(answer.text):
        return Comparison(True, "equal_text")
    if _primes_differ(gold.text, answer.text) or _greek_differs(gold.text, answer.text):
        return Comparison(False, "different_words")
    if gold.rows and answer.rows:
        return _compare_matrices(gold, answer, rounding)
    if gold.denied is not None and answer.denied is not None:
        return _compare(gold.denied, answer.denied, rounding, asked)
    if any(part.relation for part in (*gold.parts, *answer.parts)) and _is_other_choice(
        gold.text, answer.text
    ):
        return Comparison(False, "different_parts")
    if gold.parts:
        answer = answer.beside_a_list()
    if gold.parts and answer.parts:
        return _compare_parts(gold, answer, rounding)
    if _kinds_differ(gold, answer) or _kinds_differ(answer, gold):
        return Comparison(False, "different_kinds")
    return UNDECIDED


def _is_cased_alike(gold: Answer, answer: Answer) -> bool:
    """Whether words differ in their size only as words do at the beginning of a sentence; `aB` is no `ab`."""
    one, other = (unwrapped(each.text).strip(" .!()") for each in (gold, answer))
    if len(one) == 1 or len(one) > _LONGEST_PRODUCT:
        return True
    if len(one) == 2:
        # "CO" is no "Co", and "AB" no "ab"; "No" is "NO", and "Ed" is "ed".
        return one == other or one.lower() in SHORT_WORDS or one[1] == other[1]
    if gold.is_name:
        return True
    return one == other or (
        len(one) == _LONGEST_PRODUCT and other in (one.lower(), one.upper(), one.capitalize())
    )


def _primes_differ(gold: str, answer: str) -> bool:
    """Whether two are the same but for their primes, which readers of formulas pass over: `f'(x)` is no `f(x)`."""
    one, other = (_PRIME.sub("'", each) for each in (gold, answer))
    if one.count("'") == other.count("'"):
        return False
    return canonical(_PRIMED.sub("", one)) == canonical(_PRIMED.sub("", other))


def _greek_differs(gold: str, answer: str) -> bool:
    """Whether two are the same but for small and large Greek letters, which are the same to Math-Verify."""
    if _GREEK.search(gold) is None or _GREEK.findall(gold) == _GREEK.findall(answer):
        return False
    return canonical(gold).casefold() == canonical(answer).casefold()


def _is_other_choice(gold: str, answer: str) -> bool:
    """Whether one asks for all of some conditions, and the other for any of them."""
    for all_of, any_of in ((_AND, _OR), (_OR, _AND)):
        if (
            all_of.search(gold)
            and any_of.search(answer)
            and not (any_of.search(gold) or all_of.search(answer))
        ):
            return True
    return False


def _kinds_differ(one: Answer, other: Answer) -> bool:
    """Whether one is a number (or a list of them) and it is sure that the other is none, whatever it stands for."""
    if other.denied is not None or other.relation:
        # What an answer is not, or lies above, is not an answer.
        return one.value is not None
    if other.composed is not None and (other.composed.kind != "base" or not is_in_base(other.composed)):
        return one.value is not None
    if other.rows:
        return one.value is not None and (len(other.rows) > 1 or len(other.rows[0]) > 1)
    if other.said is not None:
        exact = one.value is not None or (one.parts and all(part.value is not None for part in one.parts))
        return bool(exact) and other.said not in _CONSTANTS
    return (
        one.value is not None and len(other.parts) > 1 and any(part.value is not None for part in other.parts)
    )


def _compare_quantities(gold: Answer, answer: Answer, rounding: int) -> Comparison | None:
    """Compare what both are of units that are known; None where the units say nothing."""
    one, other = gold.quantity, answer.quantity
    if one is None or other is None:
        differ = gold.value is not None and answer.value is not None and _units_differ(gold, answer)
        return Comparison(False, "different_units") if differ else None
    if one.letter and other.letter and one.letter != other.letter and one.unit == other.unit:
        # Variables of other names; "l" is "L" as a unit alone.
        return None
    if one.unit.dimension != other.unit.dimension:
        one, other = gold.beside(other), answer.beside(one)
    if (kelvin := in_kelvin(one.value, one.unit)) is not None and one.unit != other.unit:
        equal = kelvin == in_kelvin(other.value, other.unit)
        return Comparison(equal, "equal_quantities" if equal else "different_numbers")
    if one.unit.dimension != other.unit.dimension:
        return Comparison(False, "different_units")
    if one.unit == other.unit and gold.value is not None and answer.value is not None:
        return None
    wanted = multiply(one.value, divide(one.unit.factor, other.unit.factor))
    if wanted == other.value:
        return Comparison(True, "equal_quantities")
    if answer.value is not None and _rounds_to(replace(gold, value=wanted, places=None), answer, rounding):
        return Comparison(True, "equal_rounded")
    return Comparison(False, "different_numbers")


def _units_differ(one: Answer, other: Answer) -> bool:
    """Whether units that are not both known contradict each other; a percentage is not an amount of one."""
    if one.percent != other.percent:
        measured = other if one.percent else one
        return unit_of(measured.unit) is not None
    return contradict(one.unit, other.unit)


def _compare_numbers(gold: Answer, answer: Answer, rounding: int, asked: QuestionContext) -> Comparison:
    assert gold.value is not None
    assert answer.value is not None
    if gold.scale != answer.scale:
        scaled = scale(gold.value, Fraction(gold.scale)) == scale(answer.value, Fraction(answer.scale))
        # "5 million" for 5 is right where millions were asked for, and a million times too large anywhere else.
        equal = scaled or (asked.scale is not False and gold.value == answer.value)
        return Comparison(equal, "equal_numbers" if equal else "different_numbers")
    if gold.percent == answer.percent or (gold.percent and not answer.percent):
        if gold.value == answer.value:
            return Comparison(True, "equal_numbers" if gold.percent == answer.percent else "equal_percent")
        if _rounds_to(gold, answer, rounding):
            return Comparison(True, "equal_rounded")
    hundredth = Fraction(1, 100)
    if gold.percent and not answer.percent and scale(gold.value, hundredth) == answer.value:
        return Comparison(True, "equal_percent")
    if answer.percent and not gold.percent:
        if scale(answer.value, hundredth) == gold.value:
            return Comparison(True, "equal_percent")
        # "5%" for 5 is right where a percentage was asked for, and a hundred times too small anywhere else.
        if asked.percent is not False and gold.value == answer.value:
            return Comparison(True, "equal_percent")
    return Comparison(False, "different_numbers")


def _rounds_to(gold: Answer, answer: Answer, rounding: int) -> bool:
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
        # A number of zeros is near to whatever is small, and says nothing of it.
        if abs(number) * 10**decimal.places < 10 ** (min(rounding, _FEWEST_DIGITS) - 1):
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


def _compare_parts(gold: Answer, answer: Answer, rounding: int) -> Comparison:
    if (
        gold.brackets in ("()", "[]", "[)", "(]")
        and not answer.brackets
        and any(p.brackets for p in answer.parts)
    ):
        # One point, or one interval, and a list that has such among others.
        return Comparison(False, "different_kinds")
    if (ordered := _in_order(gold, answer)) is not None:
        return _compare_ordered(*ordered, rounding)
    if gold.brackets in ("()", "[]") and answer.brackets == "{}" and answer.text.startswith("\\{"):
        # A point or an interval is not a set of two numbers.
        return Comparison(False, "different_kinds")
    if gold.brackets != answer.brackets and {gold.brackets, answer.brackets} != {"", "{}"}:
        # A list may be said with brackets or without; what brackets mean beyond that is not for arithmetic to say.
        return UNDECIDED
    exact = all(part.value is not None for part in (*gold.parts, *answer.parts))
    if len(gold.parts) != len(answer.parts):
        return Comparison(False, "different_parts") if exact and gold.brackets != "{}" else UNDECIDED
    if gold.brackets in ("{}", ""):
        if (names := gold.names) is not None and (others := answer.names) is not None:
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
    return _compare_ordered(gold.parts, answer.parts, rounding)


def _compare_ordered(wanted: Sequence[Answer], given: Sequence[Answer], rounding: int) -> Comparison:
    found = [_compare(one, other, rounding, _UNKNOWN) for one, other in zip(wanted, given, strict=True)]
    if all(each.equal for each in found):
        return Comparison(True, "equal_parts")
    exact = all(part.value is not None for part in (*wanted, *given))
    if exact and any(each.equal is False for each in found):
        return Comparison(False, "different_parts")
    return UNDECIDED


def _in_order(gold: Answer, answer: Answer) -> tuple[Sequence[Answer], Sequence[Answer]] | None:
    """Return the parts of two lists of which one has names and the other has none: there, they stand in their order."""
    if len(gold.parts) != len(answer.parts) or not {gold.brackets, answer.brackets} <= {"", "()"}:
        return None
    if gold.names is not None and not any(part.name for part in answer.parts):
        return gold.parts, answer.parts
    # A point's coordinates are named in their order.
    is_sorted = answer.names is not None and answer.names == sorted(answer.names)
    if is_sorted and gold.brackets == "()" and not any(part.name for part in gold.parts):
        return gold.parts, answer.parts
    return None


def _together(found: list[bool | None]) -> Comparison:
    """Say of two answers what is found of their parts."""
    if all(found):
        return Comparison(True, "equal_parts")
    return Comparison(False, "different_parts") if False in found else UNDECIDED


def _compare_named(gold: dict[str, Answer], answer: dict[str, Answer], rounding: int) -> Comparison:
    if gold.keys() != answer.keys():
        return UNDECIDED
    found = [_compare(part, answer[name], rounding, _UNKNOWN).equal for name, part in gold.items()]
    return _together(found)


def _compare_matrices(gold: Answer, answer: Answer, rounding: int) -> Comparison:
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
    return _together(found)
