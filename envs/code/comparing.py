"""Whether an answer is the expected one. Both are plain values, built by us: nothing here calls code of theirs."""

import math
import re
from collections import deque
from collections.abc import Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

from rollgym.envs.code.steps import Relation

_NUMBERS = int | float | complex | Decimal | Fraction
_STREAM_TOLERANCE = 1e-6
_LOOSE_TOLERANCE = 1e-9
_LONGEST_NUMBER = 400
_LARGEST_KEY = 10**18
# Without zeros in front: "0010" is not ten, but four digits.
_WRITTEN_NUMBER = re.compile(r"[-+]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,4})?")


def holds(relation: Relation, expected: Any, answer: Any) -> bool:
    """Tell whether an answer has to what is expected the relation that a test asks for."""
    if relation == "equal":
        return same(expected, answer)
    if relation == "unequal":
        return not same(expected, answer)
    if relation == "identical":
        return type(expected) is type(answer) and bool(expected == answer)
    if relation in ("near", "within"):
        center, distance = expected
        return near(center, answer, distance, ends=relation == "within")
    truth = bool(answer)
    return truth if relation == "true" else not truth


def same(expected: Any, answer: Any, *, loose: bool = False) -> bool:
    """Tell whether two plain values are equal as Python says.

    Args:
        expected: What is expected.
        answer: What was answered.
        loose: Take a tuple for a list, the text of a number for the number as a key, and a number a rounding error away
            from a float that is expected as equal: what JSON cannot tell apart. It tells truth from numbers.
    """
    if loose and (isinstance(expected, bool) or isinstance(answer, bool)):
        return expected is answer
    if isinstance(expected, _NUMBERS):
        return isinstance(answer, _NUMBERS) and _same_number(expected, answer, loose)
    if isinstance(expected, list | tuple | deque):
        alike = isinstance(answer, list | tuple) if loose else type(answer) is type(expected)
        return (
            alike
            and len(expected) == len(answer)
            and all(same(one, two, loose=loose) for one, two in zip(expected, answer, strict=True))
        )
    if isinstance(expected, dict):
        return isinstance(answer, dict) and _same_mapping(expected, answer, loose)
    if isinstance(expected, set | frozenset):
        # Equal members may still differ as truth values and numbers do.
        return (
            isinstance(answer, set | frozenset)
            and expected == answer
            and (not loose or _truths(expected) == _truths(answer))
        )
    return type(expected) is type(answer) and bool(expected == answer)


def near(center: Any, answer: Any, distance: Any, *, ends: bool = True) -> bool:
    """Tell whether a number lies within a distance of another; `ends` says whether it may be as far as that."""
    real = int | float | Decimal | Fraction
    if not all(isinstance(each, real) for each in (center, answer, distance)):
        return False
    try:
        apart = abs(answer - center)
        return bool(apart <= distance if ends else apart < distance)
    except (TypeError, ArithmeticError):
        return False


def same_approximately(expected: Any, answer: Any, tolerance: float) -> bool:
    """Tell whether two values are equal, where a float that is expected may be as far off as the tolerance."""
    if isinstance(expected, float):
        return not isinstance(answer, bool) and (
            near(expected, answer, tolerance)
            or (isinstance(answer, int | float) and _is_close(expected, answer, tolerance, 0.0))
        )
    if isinstance(expected, list | tuple) and type(expected) is type(answer) and len(expected) == len(answer):
        return all(same_approximately(one, two, tolerance) for one, two in zip(expected, answer, strict=True))
    return same(expected, answer)


def same_stream(accepted: Sequence[str], written: str) -> bool:
    """Tell whether what a program wrote is one of the accepted outputs.

    Lines are compared without blanks at their ends, empty lines at the end do not count; where lines differ, they
    are compared word by word, numbers with a point as numbers.
    """
    return any(_same_lines(_lines(each), _lines(written)) for each in accepted)


def _lines(text: str) -> list[str]:
    lines = [line.strip() for line in text.replace("\r\n", "\n").split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    while lines and not lines[0]:
        lines.pop(0)
    return lines


def _same_lines(expected: list[str], written: list[str]) -> bool:
    return len(expected) == len(written) and all(
        one == two or _same_words(one.split(), two.split())
        for one, two in zip(expected, written, strict=True)
    )


def _same_words(expected: list[str], written: list[str]) -> bool:
    return len(expected) == len(written) and all(
        one == two or _same_decimal(one, two) for one, two in zip(expected, written, strict=True)
    )


def _same_decimal(expected: str, written: str) -> bool:
    if len(expected) > _LONGEST_NUMBER or len(written) > _LONGEST_NUMBER:
        return False
    if _WRITTEN_NUMBER.fullmatch(expected) is None or _WRITTEN_NUMBER.fullmatch(written) is None:
        return False
    one, two = Decimal(expected), Decimal(written)
    if max(abs(one.adjusted()), abs(two.adjusted())) > 308:
        return False
    if one == two:
        return True
    if "." not in expected and "e" not in expected.lower():
        return False
    return math.isclose(one, two, rel_tol=_STREAM_TOLERANCE, abs_tol=_STREAM_TOLERANCE)


def _same_number(expected: Any, answer: Any, loose: bool) -> bool:
    try:
        if expected == answer:
            return True
    except (TypeError, ArithmeticError):
        # Such as an infinite decimal beside a fraction.
        return False
    # Where a whole number is expected, no rounding has led to it.
    rounded = isinstance(expected, float) and isinstance(answer, int | float)
    return loose and rounded and _is_close(expected, answer, _LOOSE_TOLERANCE, _LOOSE_TOLERANCE)


def _is_close(expected: float, answer: float, relative: float, absolute: float) -> bool:
    try:
        return math.isclose(expected, answer, rel_tol=relative, abs_tol=absolute)
    except OverflowError:
        # A whole number beyond the range of floats.
        return False


def _same_mapping(expected: Mapping[Any, Any], answer: Mapping[Any, Any], loose: bool) -> bool:
    if len(expected) != len(answer):
        return False
    if loose and expected.keys() != answer.keys():
        answer = {_as_key(key): value for key, value in answer.items()}
    for key, value in expected.items():
        if key not in answer or not same(value, answer[key], loose=loose):
            return False
    return not loose or _truths(expected) == _truths(answer)


def _as_key(key: Any) -> Any:
    """Return a key as JSON has it."""
    return str(key) if type(key) is int and abs(key) < _LARGEST_KEY else key


def _truths(members: Any) -> int:
    """Count the truth values among the members of a set or the keys of a mapping, and in members of members."""
    return sum(
        _truths(member) if isinstance(member, tuple | frozenset) else isinstance(member, bool)
        for member in members
    )
