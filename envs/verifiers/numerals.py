"""Exact numbers as texts write them: plainly, as programs do, with decimals that repeat, in LaTeX, or in several parts.

A number in a base, a ratio and a quantity in several units have parts. A reader that looks for a number takes the first
or the last one for all of it: `2010_8` for `2010_7`, `1:3:2` for `1:2:3`, and two hours with any number of minutes for
two hours and a half. So they are recognised by their form, and compared as a whole.
"""

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from rollgym.envs.verifiers.exact import (
    LARGEST_DEGREE,
    NotExact,
    Value,
    add,
    bounded,
    choice,
    divide,
    factorial,
    multiply,
    rational,
    scale,
    to_power,
    value_of,
)
from rollgym.envs.verifiers.latex import unwrapped

_LONGEST = 200
_MOST_DIGITS = 2000
_DEEPEST = 20
_PLAIN = re.compile(r"([-+]?)(?:([1-9]\d{0,2}(?:,\d{3})+|\d+)(\.\d*)?|(\.\d+))")
# The commonest forms after plain numbers.
_QUOTIENT = re.compile(r"([-+]?)(?:(\d{1,18})/(\d{1,18})|\\[dt]?frac\{(\d{1,18})\}\{(\d{1,18})\})")
# Powers of ten as programs write them.
_SCIENTIFIC = re.compile(r"([-+]?(?:\d+(?:\.\d*)?|\.\d+))[eE]([-+]?\d{1,3})")
# Repeating decimals: with a line, dots or brackets over what they repeat, or dots behind it.
_REPEATING = re.compile(
    r"([-+]?)(\d{0,20})\.(?:(\d{0,20})(?:\\(?:overline|bar)\s*(?:\{(\d{1,20})\}|(\d))|\\dot\s*\{?(\d)\}?(?:(\d{0,20})\\dot\s*\{?(\d)\}?)?)"
    r"|\((\d{1,20})\)|(\d{3,60}?)(?:\.\.\.|…|\\l?dots))"
)
_REPEATED = re.compile(r"(\d*?)(?:(\d)\2{2,}|(\d{2,10}?)\3+)")
_TOKEN = re.compile(
    r"\s*(?:(?P<number>[1-9]\d{0,2}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)"
    r"|(?P<name>\\[a-zA-Z]+|pi\b|sqrt\b|π|√)|(?P<sign>\*\*|!(?![!=])|[-+*/^(){}\[\]]))"
)
_PRODUCT_SIGNS = {"\\cdot": "*", "\\times": "*", "\\ast": "*", "\\div": "/"}
_FRACTIONS = frozenset({"\\frac", "\\dfrac", "\\tfrac", "\\cfrac"})
_SPELT = {
    name: number
    for number, name in enumerate(
        (
            *(
                "zero",
                "one",
                "two",
                "three",
                "four",
                "five",
                "six",
                "seven",
                "eight",
                "nine",
                "ten",
                "eleven",
            ),
            *("twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
        )
    )
}
_TENS = {
    name: 10 * number
    for number, name in enumerate(
        ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"), start=2
    )
}
_SPELT_SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9}
_BEFORE_AND = ("hundred", *_SPELT_SCALES)
_LONGEST_SPELT = 120
_CHOICES = frozenset({"\\binom", "\\dbinom", "\\tbinom"})


def decimals(text: str) -> int | None:
    """Return how many decimal places a plain number is written with; None if it is not a plain decimal number."""
    match = _PLAIN.fullmatch(text.strip())
    if match is None:
        return None
    fraction = match[3] or match[4]
    return len(fraction) - 1 if fraction else 0


def spelt_number(text: str) -> int | None:
    """Return the whole number that words spell, such as `twenty-one` or `two hundred and five`; None of all else."""
    if len(text) > _LONGEST_SPELT or not text[:1].isalpha():
        return None
    words = text.strip().casefold().replace("-", " ").split()
    if words[:1] == ["a"] and words[1:2] and words[1] in ("hundred", *_SPELT_SCALES):
        words[0] = "one"
    total = below = 0
    smallest = 10**12
    for index, word in enumerate(words):
        if word in _SPELT and (not below % 100 or (word != "zero" and below % 100 >= 20 and not below % 10)):
            if (word == "zero" and len(words) > 1) or (below % 100 and _SPELT[word] >= 10):
                return None
            below += _SPELT[word]
        elif word in _TENS and not below % 100:
            below += _TENS[word]
        elif word == "hundred" and (0 < below < 100 or not index):
            below = max(below, 1) * 100
        elif word in _SPELT_SCALES and (below or not index) and _SPELT_SCALES[word] < smallest:
            smallest = _SPELT_SCALES[word]
            total, below = total + max(below, 1) * smallest, 0
        elif word != "and" or not index or index == len(words) - 1 or words[index - 1] not in _BEFORE_AND:
            return None
    return total + below if words else None


def exact_number(text: str) -> Value:
    """Return the exact number that a text writes.

    Args:
        text: Such as `-1,234.5`, `3/4`, `2 1/2`, `\\frac{1}{2}`, `3\\sqrt{13}` or `\\frac{9}{4}\\pi`.

    Raises:
        NotExact: It writes none.
    """
    text = text.strip()
    match = _PLAIN.fullmatch(text)
    if match is not None:
        return _plain_value(match)
    match = _QUOTIENT.fullmatch(text)
    if match is not None and int(match[3] or match[5]):
        number = Fraction(int(match[2] or match[4]), int(match[3] or match[5]))
        return value_of(-number if match[1] == "-" else number)
    if len(text) > _LONGEST:
        raise NotExact("it is too long")
    if (written := _written_otherwise(text)) is not None:
        return value_of(written)
    if "," in text and any(bracket in text for bracket in "([{"):
        # Within brackets a comma separates; "(1,234)" is a point.
        raise NotExact("it has several parts")
    return _Parser(_tokens(text)).read()


def _written_otherwise(text: str) -> Fraction | None:
    """Return a number that is written with a power of ten, or with decimals that repeat; None if it is none such."""
    if "." not in text and "e" not in text and "E" not in text:
        return None
    match = _SCIENTIFIC.fullmatch(text)
    if match is not None:
        return bounded(value_of(Fraction(match[1]) * Fraction(10) ** int(match[2]))).get((1, 0), Fraction(0))
    match = _REPEATING.fullmatch(text) if "." in text else None
    if match is None:
        return None
    sign, whole, before, line, digit, first, between, last, brackets, dots = match.groups()
    before = before or ""
    block = line or digit or brackets or f"{first or ''}{between or ''}{last or ''}"
    if dots is not None:
        shown = _REPEATED.fullmatch(dots)
        if shown is None:
            raise NotExact("its decimals go on, and it is not said how")
        before, block = shown[1], shown[2] or shown[3]
    number = Fraction(int(f"{whole}{before}" or "0"), 10 ** len(before))
    number += Fraction(int(block), 10 ** len(before) * (10 ** len(block) - 1))
    return -number if sign == "-" else number


def _plain_value(match: re.Match[str]) -> Value:
    sign, whole, fraction, bare = match.groups()
    if len(match[0]) > _MOST_DIGITS:
        raise NotExact("it has too many digits")
    digits, places = whole or "", (fraction or bare or ".")[1:]
    if "," in digits:
        digits = digits.replace(",", "")
    number = int(digits + places or "0")
    return value_of(Fraction(-number if sign == "-" else number, 10 ** len(places)))


def _tokens(text: str) -> list[str]:
    tokens = []
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            if not text[position:].strip():
                break
            raise NotExact(f"{text[position : position + 8]!r} is no number")
        position = match.end()
        name = match["name"]
        tokens.append(_PRODUCT_SIGNS.get(name, name) if name else match["number"] or match["sign"])
    if not tokens:
        raise NotExact("there is nothing")
    return tokens


class _Parser:
    """Recursive descent over the tokens of one number."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._index = 0
        self._depth = 0

    def read(self) -> Value:
        value = self._sum()
        if self._index != len(self._tokens):
            raise NotExact(f"{self._peek()!r} is in the way")
        return value

    def _peek(self) -> str:
        return self._tokens[self._index] if self._index < len(self._tokens) else ""

    def _next(self) -> str:
        token = self._peek()
        self._index += 1
        return token

    def _expect(self, token: str) -> None:
        if self._next() != token:
            raise NotExact(f"{token!r} is missing")

    def _sum(self) -> Value:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise NotExact("it is nested too deeply")
        value = self._product()
        while self._peek() in ("+", "-"):
            sign = self._next()
            term = self._product()
            value = add(value, term if sign == "+" else scale(term, Fraction(-1)))
        self._depth -= 1
        return value

    def _product(self) -> Value:
        sign = Fraction(1)
        while self._peek() in ("+", "-"):
            sign = -sign if self._next() == "-" else sign
        value = self._power()
        while True:
            token = self._peek()
            if token in ("*", "/"):
                self._next()
                factor = self._signed_power()
                value = multiply(value, factor) if token == "*" else divide(value, factor)
            elif token and (token in ("(", "{", "pi", "π", "sqrt", "√") or token.startswith("\\")):
                # "2(3)" and "2\sqrt{3}" are products; "2 3" is none, but "2 1/2" is a mixed number.
                value = self._beside(value)
            elif token[:1].isdigit() and self._tokens[self._index - 1] == "!":
                value = multiply(value, self._power())
            elif token[:1].isdigit() and self._is_mixed():
                whole = value
                part = divide(self._power(), self._after_slash())
                value = add(whole, part)
            else:
                return scale(value, sign)

    def _beside(self, value: Value) -> Value:
        mixed = self._peek() in _FRACTIONS and self._index > 0 and self._tokens[self._index - 1].isdigit()
        factor = self._power()
        if not mixed:
            return multiply(value, factor)
        part = rational(factor)
        # "2\frac{1}{3}" is two and a third.
        if part is None or not 0 < part < 1:
            raise NotExact("a number beside a fraction can be a sum or a product")
        return add(value, factor)

    def _is_mixed(self) -> bool:
        """Whether "1/2" follows on a whole number, as in "2 1/2"."""
        before = self._tokens[self._index - 1] if self._index else ""
        after = self._tokens[self._index : self._index + 3]
        whole = before.isdigit() and (
            self._index < 2 or self._tokens[self._index - 2] in ("(", "{", "+", "-")
        )
        return (
            whole
            and len(after) == 3
            and after[1] == "/"
            and after[0].isdigit()
            and after[2].isdigit()
            and int(after[0]) < int(after[2])
        )

    def _after_slash(self) -> Value:
        self._expect("/")
        return self._power()

    def _signed_power(self) -> Value:
        negative = False
        while self._peek() in ("+", "-"):
            negative ^= self._next() == "-"
        value = self._power()
        return scale(value, Fraction(-1)) if negative else value

    def _power(self) -> Value:
        base = self._atom()
        while self._peek() == "!":
            self._next()
            base = factorial(rational(base))
        if self._peek() not in ("^", "**"):
            return base
        # As programs write it, an exponent is a whole number, and so it is behind a sign: "10^-34".
        whole = self._next() == "**" or self._peek() in ("+", "-")
        exponent = rational(self._signed_power() if whole else self._argument())
        if exponent is None:
            raise NotExact("the exponent is no fraction")
        return to_power(base, exponent)

    def _atom(self) -> Value:
        token = self._next()
        if token[:1].isdigit() or token[:1] == ".":
            match = _PLAIN.fullmatch(token)
            assert match is not None
            return _plain_value(match)
        if token == "(":
            value = self._sum()
            self._expect(")")
            return value
        if token == "{":
            value = self._sum()
            self._expect("}")
            return value
        if token in ("\\pi", "pi", "π"):
            return {(1, 1): Fraction(1)}
        if token in ("\\sqrt", "sqrt", "√"):
            return self._root()
        if token in _FRACTIONS:
            return self._fraction()
        if token in _CHOICES:
            above = self._argument()
            return choice(rational(above), rational(self._argument()))
        raise NotExact(f"{token!r} is no number" if token else "it ends too early")

    def _root(self) -> Value:
        if self._peek() == "[":
            self._next()
            degree = rational(self._sum())
            self._expect("]")
            if degree is None or degree.denominator != 1 or not 2 <= degree <= LARGEST_DEGREE:
                raise NotExact("the root's degree is no small whole number")
            value = self._argument()
            number = rational(value)
            if number is not None and number < 0 and degree.numerator % 2:
                return scale(to_power(value_of(-number), 1 / degree), Fraction(-1))
            return to_power(value, 1 / degree)
        return to_power(self._argument(), Fraction(1, 2))

    def _fraction(self) -> Value:
        above = self._argument()
        return divide(above, self._argument())

    def _argument(self) -> Value:
        """What stands in braces, or without them the one character that LaTeX takes."""
        token = self._peek()
        if token in ("{", "("):
            return self._atom()
        if token[:1].isdigit():
            digit, rest = token[0], token[1:]
            if rest and (rest[0] in ".,"):
                raise NotExact("a number in pieces")
            if rest:
                self._tokens[self._index] = rest
            else:
                self._index += 1
            return value_of(Fraction(digit))
        return self._atom()


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
    """Return the several numbers that an answer is made of; None if it is not one of these forms.

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
    """Whether the digits of a number are digits of its base: `5_2` is not a number."""
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
            number = rational(exact_number(part.strip()))
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
