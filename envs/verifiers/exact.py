"""Exact numbers: rational combinations of square roots and powers of pi, read from plain text and from LaTeX.

A value is a sum of `coefficient * sqrt(radicand) * pi**power` with rational coefficients and squarefree radicands. Such
a sum is written in one way only, so two values are equal exactly if their terms are.
"""

import math
import re
from fractions import Fraction
from functools import lru_cache

Value = dict[tuple[int, int], Fraction]
"""Terms by (radicand, power of pi); no coefficient is zero."""

_LONGEST = 200
_MOST_DIGITS = 2000
_MOST_TERMS = 16
_LARGEST_EXPONENT = 64
_LARGEST_RADICAND = 10**6
_LARGEST_RESULT = 10**400
_DEEPEST = 20

_PLAIN = re.compile(r"([-+]?)(?:([1-9]\d{0,2}(?:,\d{3})+|\d+)(\.\d*)?|(\.\d+))")
# The commonest forms after plain numbers.
_QUOTIENT = re.compile(r"([-+]?)(?:(\d{1,18})/(\d{1,18})|\\[dt]?frac\{(\d{1,18})\}\{(\d{1,18})\})")
# Powers of ten as programs write them.
_SCIENTIFIC = re.compile(r"([-+]?(?:\d+(?:\.\d*)?|\.\d+))[eE]([-+]?\d{1,3})")
# Decimals that go on for ever: with a line, dots or brackets where they repeat, or dots behind what they repeat.
_REPEATING = re.compile(
    r"([-+]?)(\d{0,20})\.(?:(\d{0,20})(?:\\(?:overline|bar)\s*(?:\{(\d{1,20})\}|(\d))|\\dot\s*\{?(\d)\}?(?:(\d{0,20})\\dot\s*\{?(\d)\}?)?)"
    r"|\((\d{1,20})\)|(\d{3,60}?)(?:\.\.\.|…|\\l?dots))"
)
_REPEATED = re.compile(r"(\d*?)(?:(\d)\2{2,}|(\d{2,10}?)\3+)")
_TOKEN = re.compile(
    r"\s*(?:(?P<number>[1-9]\d{0,2}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)"
    r"|(?P<name>\\[a-zA-Z]+|pi\b|sqrt\b|π|√)|(?P<sign>[-+*/^(){}\[\]]))"
)
_RATIONAL = {(1, 0)}
_PRODUCT_SIGNS = {"\\cdot": "*", "\\times": "*", "\\ast": "*", "\\div": "/"}
_FRACTIONS = frozenset({"\\frac", "\\dfrac", "\\tfrac", "\\cfrac"})


class NotExact(ValueError):  # noqa: N818 - the name says what it is
    """The text is no exact number of the kind that is read here."""


def rational(value: Value) -> Fraction | None:
    """Return the fraction that a value is, or None if it has roots or pi in it."""
    if not value:
        return Fraction(0)
    return value.get((1, 0)) if len(value) == 1 else None


def approximate(value: Value) -> float:
    """Return a value as a float; infinite where it is too large for one."""
    try:
        return sum(float(c) * math.sqrt(root) * math.pi**power for (root, power), c in value.items())
    except OverflowError:
        return math.inf


def decimals(text: str) -> int | None:
    """Return how many decimal places a plain number is written with; None if it is no plain decimal number."""
    match = _PLAIN.fullmatch(text.strip())
    if match is None:
        return None
    fraction = match[3] or match[4]
    return len(fraction) - 1 if fraction else 0


def read_value(text: str) -> Value:
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
        return _of(-number if match[1] == "-" else number)
    if len(text) > _LONGEST:
        raise NotExact("it is too long")
    if (written := _written_otherwise(text)) is not None:
        return _of(written)
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
        return _bounded(_of(Fraction(match[1]) * Fraction(10) ** int(match[2]))).get((1, 0), Fraction(0))
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
    return _of(Fraction(-number if sign == "-" else number, 10 ** len(places)))


def _of(number: Fraction) -> Value:
    return {(1, 0): number} if number else {}


def _tokens(text: str) -> list[str]:
    tokens = []
    place = 0
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:
            if not text[place:].strip():
                break
            raise NotExact(f"{text[place : place + 8]!r} is no number")
        place = match.end()
        name = match["name"]
        tokens.append(_PRODUCT_SIGNS.get(name, name) if name else match["number"] or match["sign"])
    if not tokens:
        raise NotExact("there is nothing")
    return tokens


class _Parser:
    """Recursive descent over the tokens of one number."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._place = 0
        self._depth = 0

    def read(self) -> Value:
        value = self._sum()
        if self._place != len(self._tokens):
            raise NotExact(f"{self._peek()!r} is in the way")
        return value

    def _peek(self) -> str:
        return self._tokens[self._place] if self._place < len(self._tokens) else ""

    def _next(self) -> str:
        token = self._peek()
        self._place += 1
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
            value = _add(value, term if sign == "+" else _scale(term, Fraction(-1)))
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
                value = _multiply(value, factor) if token == "*" else _divide(value, factor)
            elif token and (token in ("(", "{", "pi", "π", "sqrt", "√") or token.startswith("\\")):
                # "2(3)" and "2\sqrt{3}" are products; "2 3" is none, but "2 1/2" is a mixed number.
                value = self._beside(value)
            elif token[:1].isdigit() and self._is_mixed():
                whole = value
                part = _divide(self._power(), self._after_slash())
                value = _add(whole, part)
            else:
                return _scale(value, sign)

    def _beside(self, value: Value) -> Value:
        mixed = self._peek() in _FRACTIONS and self._place > 0 and self._tokens[self._place - 1].isdigit()
        factor = self._power()
        if not mixed:
            return _multiply(value, factor)
        part = rational(factor)
        # "2\frac{1}{3}" is two and a third.
        if part is None or not 0 < part < 1:
            raise NotExact("a number beside a fraction can be a sum or a product")
        return _add(value, factor)

    def _is_mixed(self) -> bool:
        """Whether "1/2" follows on a whole number, as in "2 1/2"."""
        before = self._tokens[self._place - 1] if self._place else ""
        after = self._tokens[self._place : self._place + 3]
        whole = before.isdigit() and (
            self._place < 2 or self._tokens[self._place - 2] in ("(", "{", "+", "-")
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
        return _scale(value, Fraction(-1)) if negative else value

    def _power(self) -> Value:
        base = self._atom()
        if self._peek() != "^":
            return base
        self._next()
        exponent = rational(self._argument())
        if exponent is None:
            raise NotExact("the exponent is no fraction")
        return _raise(base, exponent)

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
        raise NotExact(f"{token!r} is no number" if token else "it ends too early")

    def _root(self) -> Value:
        if self._peek() == "[":
            self._next()
            degree = rational(self._sum())
            self._expect("]")
            if degree is None or degree.denominator != 1 or not 2 <= degree <= _LARGEST_EXPONENT:
                raise NotExact("the root's degree is no small whole number")
            value = self._argument()
            number = rational(value)
            if number is not None and number < 0 and degree.numerator % 2:
                return _scale(_raise(_of(-number), 1 / degree), Fraction(-1))
            return _raise(value, 1 / degree)
        return _raise(self._argument(), Fraction(1, 2))

    def _fraction(self) -> Value:
        above = self._argument()
        return _divide(above, self._argument())

    def _argument(self) -> Value:
        """What stands in braces, or the one character that LaTeX takes where there are none."""
        token = self._peek()
        if token in ("{", "("):
            return self._atom()
        if token[:1].isdigit():
            digit, rest = token[0], token[1:]
            if rest and (rest[0] in ".,"):
                raise NotExact("a number in pieces")
            if rest:
                self._tokens[self._place] = rest
            else:
                self._place += 1
            return _of(Fraction(digit))
        return self._atom()


def _add(one: Value, other: Value) -> Value:
    terms = dict(one)
    for key, coefficient in other.items():
        total = terms.get(key, Fraction(0)) + coefficient
        if total:
            terms[key] = total
        else:
            terms.pop(key, None)
    if len(terms) > _MOST_TERMS:
        raise NotExact("it has too many terms")
    return terms


def _scale(value: Value, factor: Fraction) -> Value:
    return value if factor == 1 else {key: coefficient * factor for key, coefficient in value.items()}


def _multiply(one: Value, other: Value) -> Value:
    if one.keys() == other.keys() == _RATIONAL:
        return _bounded({(1, 0): one[1, 0] * other[1, 0]})
    terms: Value = {}
    for (root, power), coefficient in one.items():
        for (other_root, other_power), factor in other.items():
            common = math.gcd(root, other_root)
            # Both are squarefree, and so is what is left of their product without the common square.
            key = root * other_root // common**2, power + other_power
            terms = _add(terms, {key: coefficient * factor * common})
    return _bounded(terms)


def _divide(value: Value, divisor: Value) -> Value:
    if len(divisor) != 1:
        raise NotExact("a division by zero or by a sum")
    (root, power), coefficient = next(iter(divisor.items()))
    return _multiply(value, {(root, -power): 1 / (coefficient * root)})


def _raise(base: Value, exponent: Fraction) -> Value:
    if exponent.denominator == 1:
        return _whole_power(base, int(exponent))
    number = rational(base)
    if number is None or number < 0:
        raise NotExact("a root of a root, of pi or of a negative number")
    if exponent.denominator == 2:
        return _whole_power(_square_root(number), exponent.numerator)
    above, below = (
        _whole_root(number.numerator, exponent.denominator),
        _whole_root(number.denominator, exponent.denominator),
    )
    return _whole_power(_of(Fraction(above, below)), exponent.numerator)


def _whole_power(base: Value, exponent: int) -> Value:
    if abs(exponent) > _LARGEST_EXPONENT:
        raise NotExact("the exponent is too large")
    if exponent < 0:
        return _divide(_of(Fraction(1)), _whole_power(base, -exponent))
    if not base and exponent == 0:
        raise NotExact("zero to the power of zero")
    value = _of(Fraction(1))
    for _ in range(exponent):
        value = _multiply(value, base)
    return value


def _square_root(number: Fraction) -> Value:
    if not number:
        return {}
    outside, root = _squarefree(number.numerator * number.denominator)
    return {(root, 0): Fraction(outside, number.denominator)}


@lru_cache(maxsize=1024)
def _squarefree(number: int) -> tuple[int, int]:
    """Return (a, b) with number = a * a * b and b squarefree."""
    whole = math.isqrt(number)
    if whole * whole == number:
        return whole, 1
    if number > _LARGEST_RADICAND:
        raise NotExact("the number under the root is too large")
    outside, rest, divisor = 1, number, 2
    while divisor * divisor <= rest:
        while rest % (divisor * divisor) == 0:
            rest //= divisor * divisor
            outside *= divisor
        divisor += 1
    return outside, rest


def _whole_root(number: int, degree: int) -> int:
    root = round(number ** (1 / degree)) if number < 10**15 else 0
    if root**degree != number:
        raise NotExact("a root that is no whole number")
    return root


def _bounded(value: Value) -> Value:
    for coefficient in value.values():
        if abs(coefficient.numerator) > _LARGEST_RESULT or coefficient.denominator > _LARGEST_RESULT:
            raise NotExact("it is too large")
    return value
