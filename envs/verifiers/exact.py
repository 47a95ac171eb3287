"""Exact numbers: rational combinations of square roots and powers of pi.

A value is a sum of `coefficient * sqrt(radicand) * pi**power` with rational coefficients and squarefree radicands. Such
a sum is written in one way only, so two values are equal exactly if their terms are.
"""

import math
from fractions import Fraction
from functools import lru_cache

Value = dict[tuple[int, int], Fraction]
"""Terms by (radicand, power of pi); no coefficient is zero."""

LARGEST_EXPONENT = 64
"""Neither powers nor the degrees of roots are larger."""

_MOST_TERMS = 16
_LARGEST_RADICAND = 10**6
_LARGEST_RESULT = 10**400
_RATIONAL = {(1, 0)}


class NotExact(ValueError):  # noqa: N818 - the name says what it is
    """It is no exact number of the kind that is known here."""


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


def value_of(number: Fraction) -> Value:
    """Return a fraction as a value."""
    return {(1, 0): number} if number else {}


def add(one: Value, other: Value) -> Value:
    """Return a sum.

    Raises:
        NotExact: It has too many terms.
    """
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


def scale(value: Value, factor: Fraction) -> Value:
    """Return a value times a fraction that is not zero."""
    return value if factor == 1 else {key: coefficient * factor for key, coefficient in value.items()}


def multiply(one: Value, other: Value) -> Value:
    """Return a product.

    Raises:
        NotExact: It is too large, or has too many terms.
    """
    if one.keys() == other.keys() == _RATIONAL:
        return bounded({(1, 0): one[1, 0] * other[1, 0]})
    terms: Value = {}
    for (root, power), coefficient in one.items():
        for (other_root, other_power), factor in other.items():
            common = math.gcd(root, other_root)
            # Both are squarefree, and so is what is left of their product without the common square.
            key = root * other_root // common**2, power + other_power
            terms = add(terms, {key: coefficient * factor * common})
    return bounded(terms)


def divide(value: Value, divisor: Value) -> Value:
    """Return a quotient.

    Raises:
        NotExact: The divisor is zero or a sum, or the quotient is too large.
    """
    if len(divisor) != 1:
        raise NotExact("a division by zero or by a sum")
    (root, power), coefficient = next(iter(divisor.items()))
    return multiply(value, {(root, -power): 1 / (coefficient * root)})


def to_power(base: Value, exponent: Fraction) -> Value:
    """Return a power; a root is one with the exponent 1/2, or the like.

    Raises:
        NotExact: It is no value, or too large.
    """
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
    return _whole_power(value_of(Fraction(above, below)), exponent.numerator)


def _whole_power(base: Value, exponent: int) -> Value:
    if abs(exponent) > LARGEST_EXPONENT:
        raise NotExact("the exponent is too large")
    if exponent < 0:
        return divide(value_of(Fraction(1)), _whole_power(base, -exponent))
    if not base and exponent == 0:
        raise NotExact("zero to the power of zero")
    value = value_of(Fraction(1))
    for _ in range(exponent):
        value = multiply(value, base)
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


def bounded(value: Value) -> Value:
    """Return a value that is not too large.

    Raises:
        NotExact: It is.
    """
    for coefficient in value.values():
        if abs(coefficient.numerator) > _LARGEST_RESULT or coefficient.denominator > _LARGEST_RESULT:
            raise NotExact("it is too large")
    return value
