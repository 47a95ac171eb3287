"""Sums of a Countdown game: read without `eval`, drawn at random, and solved exactly if a solution exists."""

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from functools import lru_cache
from itertools import combinations, count

import numpy as np

_OPERATIONS: Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_PLAIN = str.maketrans({"×": "*", "÷": "/", "−": "-", "·": "*", "x": "*", "X": "*"})
_SYMBOLS = re.compile(r"[\d+\-*/() ]+", re.ASCII)
_LONGEST = 200
_LARGEST_PART = 10**9

Sums = dict[Fraction, str]
"""Values that can be reached, each with one way to it."""


class ExpressionError(ValueError):
    """A text is not an expression of whole numbers; the message says why."""


def evaluate(text: str) -> tuple[Fraction, list[int]]:
    """Return the exact value of an expression with + - * / and parentheses, and the numbers in it.

    Raises:
        ExpressionError: It is not an expression, or divides by zero.
    """
    plain = text.translate(_PLAIN).strip()
    if len(plain) > _LONGEST or not _SYMBOLS.fullmatch(plain):
        raise ExpressionError("An expression has whole numbers, + - * / and parentheses only.")
    try:
        # Nothing but numbers, operators and parentheses is left, and the tree is walked, not run.
        root = ast.parse(plain, mode="eval").body
    except SyntaxError as error:
        raise ExpressionError("The expression is not complete, or has a slip in it.") from error
    numbers: list[int] = []
    return _value(root, numbers), numbers


def _value(node: ast.expr, numbers: list[int]) -> Fraction:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        numbers.append(node.value)
        return Fraction(node.value)
    if not isinstance(node, ast.BinOp) or type(node.op) not in _OPERATIONS:
        raise ExpressionError("Put one of + - * / between two numbers or parentheses.")
    left, right = _value(node.left, numbers), _value(node.right, numbers)
    if isinstance(node.op, ast.Div) and right == 0:
        raise ExpressionError("The expression divides by zero.")
    return _OPERATIONS[type(node.op)](left, right)


def draw_sum(generator: np.random.Generator, numbers: list[int]) -> tuple[Fraction, str]:
    """Join numbers by operators at random until one value is left; return it and how it came about."""
    parts = [(Fraction(number), str(number)) for number in numbers]
    # One call for all that is drawn: calls are what costs time here, and most sums are thrown away.
    for one, other, way in generator.random((len(numbers) - 1, 3)).tolist():
        first = parts.pop(int(one * len(parts)))
        second = parts.pop(int(other * len(parts)))
        joined = list(_joined(first, second))
        parts.append(joined[int(way * len(joined))])
    value, text = parts[0]
    return value, _bare(text)


def take_apart(
    generator: np.random.Generator, target: int, count: int, largest: int
) -> tuple[list[int], str] | None:
    """Decompose a target into numbers, one after the other; None if the last one is too large, or does not exist.

    Returns:
        The numbers, and the expression of them that is the target.
    """
    numbers: list[int] = []
    form, rest = "{}", target
    for left in range(count - 1, 0, -1):
        number = _next_number(generator, rest, left, largest)
        ways = [
            (f"({number} + {{}})", rest - number),
            (f"({number} - {{}})", number - rest),
            (f"({{}} - {number})", rest + number),
        ]
        if rest % number == 0:
            ways.append((f"({number} * {{}})", rest // number))
        if rest * number <= _LARGEST_PART:
            ways.append((f"({{}} / {number})", rest * number))
        possible = [way for way in ways if 1 <= way[1] <= (largest if left == 1 else _LARGEST_PART)]
        if not possible:
            return None
        part, rest = possible[int(generator.integers(len(possible)))]
        numbers.append(number)
        form = form.format(part)
    if not 1 <= rest <= largest:
        return None
    return [*numbers, rest], _bare(form.format(rest))


def _next_number(generator: np.random.Generator, rest: int, left: int, largest: int) -> int:
    """Draw a number whose remainder the given number of further numbers can make."""
    if rest > (left + 1) * largest:
        # No sum is as large: only a product is.
        numbers = np.arange(2, largest + 1)
        divisors = numbers[(rest % numbers == 0) & (rest // numbers <= float(largest) ** left)]
        if len(divisors):
            return int(divisors[generator.integers(len(divisors))])
    least = max(1, rest - left * largest)
    return int(generator.integers(min(least, largest), largest + 1))


def solve(numbers: list[int], target: int, *, use_all: bool, most: int | None = None) -> str | None:
    """Return an expression of the target, or None if there is none: the search is complete, unless it is given up.

    It meets in the middle. What three numbers or fewer can make is listed; of more, one part is listed, and the other
    must then make what is missing.

    Args:
        numbers: Each may be used once.
        target: The wanted value of the expression.
        use_all: Whether each must be used.
        most: Sums that are looked up before the search is given up; None for as many as it takes.
    """
    looks = count()
    sizes = [len(numbers)] if use_all else range(1, len(numbers) + 1)
    for size in sizes:
        for chosen in sorted(set(combinations(sorted(numbers), size))):
            try:
                found = _reach(chosen, Fraction(target), looks, most)
            except _GivenUpError:
                return None
            if found is not None:
                return _bare(found)
    return None


class _GivenUpError(Exception):
    """A search takes too long."""


def _reach(numbers: tuple[int, ...], target: Fraction, looks: Iterator[int], most: int | None) -> str | None:
    if most is not None and next(looks) >= most:
        raise _GivenUpError
    if len(numbers) <= 3:
        return _all_sums(numbers).get(target)
    for few, rest in _splits(numbers):
        for value, text in _all_sums(few).items():
            for missing, form in _missing(target, value):
                if (found := _reach(rest, missing, looks, most)) is not None:
                    return f"({form.format(known=text, rest=found)})"
    return None


def _missing(target: Fraction, known: Fraction) -> Iterator[tuple[Fraction, str]]:
    """Return what must be joined to a known value to make the target, and how."""
    yield target - known, "{known} + {rest}"
    yield target + known, "{rest} - {known}"
    yield known - target, "{known} - {rest}"
    if known != 0:
        yield target / known, "{known} * {rest}"
        yield target * known, "{rest} / {known}"
        if target != 0:
            yield known / target, "{known} / {rest}"


@lru_cache(maxsize=4096)
def _all_sums(numbers: tuple[int, ...]) -> Sums:
    """Return all values that use each of up to three numbers once."""
    if len(numbers) == 1:
        return {Fraction(numbers[0]): str(numbers[0])}
    sums: Sums = {}
    for few, rest in _splits(numbers):
        for first in _all_sums(few).items():
            for second in _all_sums(rest).items():
                for value, text in _joined(first, second):
                    sums.setdefault(value, text)
    return sums


def _splits(numbers: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Divide numbers into two parts in every way; the first part is the smaller one, or as large."""
    seen = set()
    for size in range(1, len(numbers) // 2 + 1):
        for indices in combinations(range(len(numbers)), size):
            few = tuple(numbers[index] for index in indices)
            rest = tuple(number for index, number in enumerate(numbers) if index not in indices)
            if (few, rest) not in seen:
                seen.add((few, rest))
                yield few, rest


def _joined(first: tuple[Fraction, str], second: tuple[Fraction, str]) -> Iterator[tuple[Fraction, str]]:
    """Return what two values can be joined to."""
    (left, one), (right, other) = first, second
    yield left + right, f"({one} + {other})"
    yield left - right, f"({one} - {other})"
    yield right - left, f"({other} - {one})"
    yield left * right, f"({one} * {other})"
    if right != 0:
        yield left / right, f"({one} / {other})"
    if left != 0:
        yield right / left, f"({other} / {one})"


def _bare(text: str) -> str:
    """Return an expression without the parentheses around all of it."""
    return text[1:-1] if text.startswith("(") else text
