"""How large the powers, and the roots, of an answer grow; told by one look at each character, without working any out.

People raise sums to the power of the year, and numbers to that of a hundred thousand. What is beyond is worked out for
longer than anybody waits.
"""

import math
import re
from dataclasses import dataclass

_MOST_DIGITS = 100_000
_MOST_DIGITS_IN_ALL = 200_000
_MOST_DIGITS_UNDER_ROOT = 2_100
_LARGEST_POWER_OF_LETTERS = 200
_LARGEST_POWER_OF_CONSTANTS = 2_100

_TOKEN = re.compile(r"\\[a-zA-Z]+|\\.|\*\*|(\d+)(?:\.\d+)?|\S", re.DOTALL)
_EXPONENT = re.compile(
    r"[\s{(]*+[-+]?+\s*+(?P<above>\\[dt]?frac[\s{]*+)?(?P<whole>\d++)(?P<below>\s*+/)?", re.DOTALL
)
_OPENING, _CLOSING = "([{", ")]}"
_CHOICES = frozenset({r"\binom", r"\dbinom", r"\tbinom"})
_FUNCTIONS = frozenset(rf"\{name}" for name in ("sin", "cos", "tan", "cot", "sec", "csc", "log", "ln", "exp"))
# What stands between numbers and leaves them numbers.
_PLAIN = frozenset(
    rf"\{name}"
    for name in ("frac", "dfrac", "tfrac", "cfrac", "left", "right", "cdot", "times", "div", "displaystyle")
)
_ROOTS = frozenset({r"\sqrt", "√"})
_CONSTANTS = _ROOTS | {r"\pi", "π", "i", "e"}


@dataclass
class _Part:
    """What stands in brackets, or is a number, letter or command.

    Attributes:
        digits: How many digits it has at most, where it is worked out; of numbers alone.
        degree: The largest product of exponents of what holds letters or constants in it.
        power: How large a power may be taken of it.
        is_single: Whether it is one letter or constant, whose powers nobody works out.
        is_root: Whether a root is taken of it.
        is_choice: Whether it is the upper or lower number of a choice.
    """

    digits: float = 0.0
    degree: int = 1
    power: float = math.inf
    is_single: bool = False
    is_root: bool = False
    is_choice: bool = False

    def take(self, part: "_Part", exponent: int = 1) -> None:
        """Let it hold a part, or a power of one that it holds already."""
        self.digits += part.digits * exponent
        self.power = min(self.power, part.power)
        if part.power < math.inf:
            self.degree = max(self.degree, part.degree * exponent)

    def grows(self, exponent: int) -> bool:
        """Whether a power of it is too large."""
        beyond = not self.is_single and self.degree * exponent > self.power
        return beyond or self.digits * exponent > _MOST_DIGITS


def has_large_power(answer: str) -> bool:
    """Whether an answer has a power, or a root, that is too large to be worked out.

    Args:
        answer: What stands where the answer is given; the numbers in it are none of more than a thousand digits, and
            those in exponents of not many.
    """
    reader = _Reader()
    return any(reader.read(match) for match in _TOKEN.finditer(answer)) or reader.has_too_many_digits


class _Reader:
    """Reads an answer from left to right."""

    def __init__(self) -> None:
        self._open = [_Part()]
        self._last: _Part | None = None  # what a power would be taken of
        self._command = ""

    @property
    def has_too_many_digits(self) -> bool:
        """Whether what is open has more digits than are worked out."""
        return any(part.digits > _MOST_DIGITS_IN_ALL for part in self._open)

    def read(self, match: re.Match[str]) -> bool:
        """Read a token; tells whether it ends a power, or a root, that is too large."""
        token = match[0]
        if token in _OPENING:
            self._begin()
        elif token in _CLOSING:
            return self._end(token)
        elif token in ("^", "**"):
            return self._raise(_EXPONENT.match(match.string, match.end()))
        elif token == "!":
            self._limit(_LARGEST_POWER_OF_LETTERS)
        else:
            self._take(token, match[1])
        return False

    def _begin(self) -> None:
        # The second pair of brackets of a choice follows the first.
        is_second = self._last is not None and self._last.is_choice
        self._open.append(
            _Part(is_choice=is_second or self._command in _CHOICES, is_root=self._command in _ROOTS)
        )
        self._last, self._command = None, ""

    def _end(self, token: str) -> bool:
        self._last, self._command = None, ""
        if len(self._open) == 1:
            return False
        part = self._last = self._open.pop()
        if part.is_root and token == "]":
            # The root's order; what it is taken of follows.
            self._command = r"\sqrt"
        if part.is_choice:
            self._limit(_LARGEST_POWER_OF_LETTERS)
        self._open[-1].take(part)
        return part.is_root and part.digits > _MOST_DIGITS_UNDER_ROOT

    def _raise(self, exponent: re.Match[str] | None) -> bool:
        part, self._last = self._last, None
        if part is None or exponent is None:
            return False
        is_root = exponent["above"] is not None or exponent["below"] is not None
        if is_root and part.digits > _MOST_DIGITS_UNDER_ROOT:
            return True
        raised = int(exponent["whole"])
        if part.grows(raised):
            return True
        self._open[-1].take(part, raised)
        return False

    def _limit(self, power: int) -> None:
        if self._last is not None:
            self._last.power = power
            self._open[-1].take(self._last)

    def _take(self, token: str, whole: str | None) -> None:
        self._last, self._command = _part_of(token, whole), token
        if self._last is not None:
            self._open[-1].take(self._last)


def _part_of(token: str, whole: str | None) -> _Part | None:
    if whole is not None:
        return _Part(digits=math.log10(max(1, int(whole))))
    if token in _CONSTANTS:
        return _Part(power=_LARGEST_POWER_OF_CONSTANTS, is_single=True)
    if token in _PLAIN or not token.removeprefix("\\").isalpha():
        return None
    return _Part(power=_LARGEST_POWER_OF_LETTERS, is_single=token not in _FUNCTIONS)
