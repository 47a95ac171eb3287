"""Generated mathematical questions with exact answers, for training and for audits without data."""

import math
from collections.abc import Callable, Mapping
from fractions import Fraction

from numpy.random import Generator


def draw(kind: str, generator: Generator) -> tuple[str, str]:
    """Draw a question of a kind and its answer."""
    return _MAKERS[kind](generator)


def _number(generator: Generator, low: int, high: int) -> int:
    return int(generator.integers(low, high + 1))


def _fractions(generator: Generator) -> tuple[str, str]:
    one = Fraction(_number(generator, 1, 11), _number(generator, 2, 12))
    other = Fraction(_number(generator, 1, 11), _number(generator, 2, 12))
    name = ("sum", "product", "difference")[_number(generator, 0, 2)]
    value = {"sum": one + other, "product": one * other, "difference": one - other}[name]
    return f"What is the {name} of {one} and {other}? Give a reduced fraction or a whole number.", str(value)


def _equation(generator: Generator) -> tuple[str, str]:
    factor, shift, right = _number(generator, 2, 12), _number(generator, -20, 20), _number(generator, -40, 40)
    sign = "+" if shift >= 0 else "-"
    return f"Solve ${factor}x {sign} {abs(shift)} = {right}$ for $x$.", str(Fraction(right - shift, factor))


def _percentage(generator: Generator) -> tuple[str, str]:
    whole = 20 * _number(generator, 2, 40)
    part = _number(generator, 1, 19) * whole // 20
    return f"What percentage of {whole} is {part}?", f"{Fraction(100 * part, whole)}%"


def _root(generator: Generator) -> tuple[str, str]:
    one, other = _number(generator, 1, 20), _number(generator, 1, 20)
    inside, outside = one * one + other * other, 1
    for divisor in range(2, math.isqrt(inside) + 1):
        while inside % (divisor * divisor) == 0:
            inside //= divisor * divisor
            outside *= divisor
    root = f"\\sqrt{{{inside}}}" if inside > 1 else ""
    answer = f"{outside}{root}" if outside > 1 or not root else root
    return (
        f"The legs of a right triangle are {one} and {other} long. How long is its hypotenuse, exactly?",
        answer,
    )


def _points(generator: Generator) -> tuple[str, str]:
    first = _number(generator, -9, 9), _number(generator, -9, 9)
    second = _number(generator, -9, 9), _number(generator, -9, 9)
    middle = [Fraction(one + other, 2) for one, other in zip(first, second, strict=True)]
    return f"What is the midpoint of ${first}$ and ${second}$?", f"({middle[0]}, {middle[1]})"


def _divisors(generator: Generator) -> tuple[str, str]:
    one, other = _number(generator, 12, 400), _number(generator, 12, 400)
    if _number(generator, 0, 1):
        return f"What is the greatest common divisor of {one} and {other}?", str(math.gcd(one, other))
    return f"What is the least common multiple of {one} and {other}?", str(math.lcm(one, other))


_MAKERS: Mapping[str, Callable[[Generator], tuple[str, str]]] = {
    "fractions": _fractions,
    "equation": _equation,
    "percentage": _percentage,
    "root": _root,
    "points": _points,
    "divisors": _divisors,
}
KINDS: tuple[str, ...] = tuple(_MAKERS)
"""The kinds of questions."""
