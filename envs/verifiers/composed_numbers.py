"""Answers that are written with several numbers and are one: in a base, as a ratio, as a quantity in several units.

A reader that looks for a number takes the first or the last one for all of it: `2010_8` for `2010_7`, `1:3:2` for
`1:2:3`, and two hours with any number of minutes for two hours and a half. So they are told by their form, and compared
as a whole.
"""

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from rollgym.envs.verifiers.exact import NotExact, rational
from rollgym.envs.verifiers.latex import unwrapped
from rollgym.envs.verifiers.numerals import read_value

_LONGEST = 200
_LARGEST_BASE = 36
_IN_BASE = re.compile(
    r"(?P<sign>[-−]?)\(?(?P<digits>\d[\dA-Z]{0,100}(?:\.[\dA-Z]{1,100})?)\)?\s?"
    r"_\s?(?:(?P<digit>[2-9])|\{\s?(?P<base>\d{1,2})\s?\})"
)
_SPACING = re.compile(r"\\[,;:! ]|\\quad|\\qquad|~")
_NUMBER = r"-?\d{1,12}(?:,\d{3}){0,4}(?:\.\d{1,12})?(?:/[1-9]\d{0,11})?"
_QUANTITY = re.compile(rf"({_NUMBER})\s?([a-zA-Z]{{1,20}})\.?")
_QUANTITIES = re.compile(rf"(?:{_QUANTITY.pattern}(?:\s(?:and\s)?|$)){{2,8}}")
_NO_UNITS = frozenset({"and", "or", "to", "pi", "e", "x", "y", "z", "n", "k", "i"})
_FEET_AND_INCHES = re.compile(r"\A(\d{1,9})\s?['’′]\s?(\d{1,9}(?:\.\d{1,9})?)\s?(?:\"|''|’’|[”″])\Z")
_FEWEST_OF_A_RATIO = 3


@dataclass(frozen=True, slots=True)
class ComposedNumber:
    """An answer that several numbers make up.

    Attributes:
        kind: What they make up.
        numbers: They, in their order; of a number in a base there are none.
        names: The units of a quantity, or the digits and the base of a number.
    """

    kind: Literal["base", "ratio", "quantity"]
    numbers: tuple[Fraction, ...]
    names: tuple[str, ...]


def read_composed(text: str) -> ComposedNumber | None:
    """Return the several numbers that an answer is made of; None where it is none such.

    Args:
        text: Such as `2010_7`, `1:2:3` (of two numbers, a ratio is their quotient) or `2 \\text{ h } 30 \\text{ min}`.
    """
    if len(text) > _LONGEST:
        return None
    if "_" in text:
        return _in_base(text.strip().strip("$").strip())
    if text.count(":") >= _FEWEST_OF_A_RATIO - 1:
        return _ratio(text.strip().strip("$").strip())
    plain = " ".join(_SPACING.sub(" ", unwrapped(text)).split())
    return _quantity(_FEET_AND_INCHES.sub(r"\1 ft \2 in", plain))


def same_composed(one: ComposedNumber, other: ComposedNumber) -> bool:
    """Whether two are equal: digit by digit, in proportion, or unit by unit (`h` is `hours`)."""
    if one.kind != other.kind or len(one.numbers) != len(other.numbers):
        return False
    if one.kind == "base":
        return one.names == other.names
    if one.kind == "ratio":
        first, second = one.numbers[0], other.numbers[0]
        return all(
            mine * second == theirs * first
            for mine, theirs in zip(one.numbers[1:], other.numbers[1:], strict=True)
        )
    return one.numbers == other.numbers and all(
        mine[0] == theirs[0] for mine, theirs in zip(one.names, other.names, strict=True)
    )


def is_in_base(number: ComposedNumber) -> bool:
    """Whether the digits of a number are digits of its base: `5_2` is no number."""
    digits, base = number.names
    return all(int(digit, _LARGEST_BASE) < int(base) for digit in digits if digit.isalnum())


def _in_base(text: str) -> ComposedNumber | None:
    match = _IN_BASE.fullmatch(text)
    if match is None:
        return None
    base = int(match["digit"] or match["base"])
    if not 2 <= base <= _LARGEST_BASE:
        return None
    digits = match["digits"].lstrip("0") or "0"
    return ComposedNumber("base", (), (match["sign"].replace("−", "-") + digits, str(base)))


def _ratio(text: str) -> ComposedNumber | None:
    numbers = []
    for part in text.split(":"):
        try:
            number = rational(read_value(part.strip()))
        except NotExact:
            return None
        if not number:
            return None
        numbers.append(number)
    return ComposedNumber("ratio", tuple(numbers), ())


def _quantity(text: str) -> ComposedNumber | None:
    if _QUANTITIES.fullmatch(text) is None:
        return None
    found = _QUANTITY.findall(text)
    units = tuple(unit.casefold() for _, unit in found)
    # Two amounts of one thing are a list, and letters beside numbers can be variables.
    if len(set(units)) < len(units) or not _NO_UNITS.isdisjoint(units):
        return None
    return ComposedNumber("quantity", tuple(_fraction(number) for number, _ in found), units)


def _fraction(number: str) -> Fraction:
    above, _, below = number.replace(",", "").partition("/")
    return Fraction(above) / int(below or 1)
