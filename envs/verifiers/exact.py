"""Exact numbers: rational combinations of square roots and powers of pi.

A value is a sum of `coefficient * sqrt(radicand) * pi**power` with rational coefficients and squarefree radicands. Such
a sum is written in one way only, so two values are equal exactly if their terms are.
"""

import math
from fractions import Fraction
from functools import lru_cache

Value = dict[tuple[int, int], Fraction]
"""Terms by (radicand, power of pi); no coefficient is zero."""

LARGEST_DEGREE = 64
"""No root has a higher degree."""

_MOST_TERMS = 16
_LARGEST_RADICAND = 10**6
# Numbers of 7,000 digits: people raise the year to the power of the year.
_MOST_BITS = 24_000
_MOST_BITS_UNDER_ROOT = 4_000
_LARGEST_POWER_OF_SUMS = 2_100
_LARGEST_POWER_OF_CONSTANTS = 10**6
_LARGEST_FACTORIAL = 2_100
_LARGEST_CHOICE = 5_000
_RATIONAL = {(1, 0)}


class NotExact(ValueError):  # noqa: N818 - the name says what it is
    """It is not an exact number of the kind that is known here."""


def rational(value: Value) -> Fraction | None:
    """Return the fraction that a value is, or None if it has roots or pi in it."""
    if not value:
        return Fraction(0)
    return value.get((1, 0)) if len(value) == 1 else None


def approximate(value: Value) -> float:
    """Return a value as a float; infinite if it is too large for one."""
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
        NotExact: It is too large, or has too many terms.
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
    return bounded(terms)


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
        NotExact: It is not a value, or too large.
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
    if exponent < 0:
        return divide(value_of(Fraction(1)), _whole_power(base, -exponent))
    if not base and exponent == 0:
        raise NotExact("zero to the power of zero")
    number = rational(base)
    if number is None:
        return _power_of_roots(base, exponent)
    # A power has about as many bits as the base times the exponent; it is not worked out to be thrown away.
    bits = max(number.numerator.bit_length(), number.denominator.bit_length())
    if (bits - 1) * exponent > _MOST_BITS:
        raise NotExact("the power is too large")
    return bounded(value_of(number**exponent))


def _power_of_roots(base: Value, exponent: int) -> Value:
    if exponent > (_LARGEST_POWER_OF_SUMS if len(base) > 1 else _LARGEST_POWER_OF_CONSTANTS):
        raise NotExact("the exponent is too large")
    value = value_of(Fraction(1))
    for bit in f"{exponent:b}":
        value = multiply(value, value)
        if bit == "1":
            value = multiply(value, base)
    return value


def factorial(number: Fraction | None) -> Value:
    """Return the factorial of a whole number.

    Raises:
        NotExact: It is none, or too large.
    """
    if number is None or number.denominator != 1 or not 0 <= number <= _LARGEST_FACTORIAL:
        raise NotExact("a factorial of what is no small whole number")
    return value_of(Fraction(math.factorial(number.numerator)))


def choice(above: Fraction | None, below: Fraction | None) -> Value:
    """Return how many choices of so many there are among so many.

    Raises:
        NotExact: They are not whole numbers, or too large.
    """
    if above is None or below is None or above.denominator != 1 or below.denominator != 1:
        raise NotExact("a choice of what is no whole number")
    if not 0 <= below <= _LARGEST_CHOICE or not 0 <= above <= _LARGEST_CHOICE:
        raise NotExact("a choice of what is no small whole number")
    return value_of(Fraction(math.comb(above.numerator, below.numerator)))


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
    if degree > LARGEST_DEGREE or number.bit_length() > _MOST_BITS_UNDER_ROOT:
        raise NotExact("a root of a high degree, or of a large number")
    if number == 0:
        return 0
    # Newton's iteration from above, in whole numbers.
    root = 1 << -(-number.bit_length() // degree)
    while (lower := ((degree - 1) * root + number // root ** (degree - 1)) // degree) < root:
        root = lower
    if root**degree != number:
        raise NotExact("a root that is no whole number")
    return root


def bounded(value: Value) -> Value:
    """Return a value that is not too large.

    Raises:
        NotExact: It is.
    """
    for coefficient in value.values():
        if max(coefficient.numerator.bit_length(), coefficient.denominator.bit_length()) > _MOST_BITS:
            raise NotExact("it is too large")
    return value
