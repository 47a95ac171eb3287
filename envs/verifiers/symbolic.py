"""Comparisons that need a computer algebra system: Math-Verify's, in a process of its own and under a clock.

A policy may write whatever it likes. `too_much` refuses forms whose value, or whose reading, grows out of all bounds:
that costs one look at each character, and the clock ends the rest.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from rollgym.envs.verifiers.pool import CallFailed, CallTimeout, NoProcess, PoolShare

_MOST_DIGITS = 100_000
_MOST_DIGITS_IN_ALL = 200_000
_MOST_DIGITS_UNDER_ROOT = 2_100
_LARGEST_POWER_OF_LETTERS = 200
_LARGEST_POWER_OF_CONSTANTS = 2_100
# People raise sums to the power of the year, and numbers to that of a hundred thousand; more takes too long.

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
        digits: How many digits it has at most once it is worked out; of numbers alone.
        degree: The largest product of exponents of what holds letters or constants in it.
        power: How large a power may be taken of it.
        is_single: Whether it is one letter or constant, whose powers are not worked out.
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


def _has_large_power(answer: str) -> bool:
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


LONGEST = 2000
_TOO_LARGE = "it has a power, factorial or choice whose value is too large to be worked out"
_DEEPEST = 40
_MOST_COMMANDS = 300
_LONGEST_NUMBER = 1000
_LARGEST_EXPONENT = 100_000
_LARGEST_ARGUMENT = 5_000
_LONGEST_EXPONENT = 6
_LARGEST_POWER = 12

_COMMAND = re.compile(r"\\[a-zA-Z]+|[-+*/^_=<>]")
_NUMBER = re.compile(r"\d+")
_ANY_EXPONENT = re.compile(r"(?:\^|\*\*)[\s{(]*+[-+]?+\s*+(?:\\[dt]?frac[\s{]*+)?(\d++)")
# A power that stands in an exponent.
_TOWER = re.compile(r"(?:\^|\*\*)\s*+[{(]*+\s*+(\d++)\s*+[})]?\s*+(?:\^|\*\*)\s*+[{(]*+\s*+(\d++)")
_FACTORIAL = re.compile(r"(?<!\d)(\d++)\s*+[)}]*+\s*+!(?!=)")
_CHOICE = re.compile(r"(?:\\[dt]?binom|\\choose|binomial|factorial)\s*+[{(]?\s*+(\d++)")
_OF_POWER = re.compile(
    r"(?:\\[dt]?binom|\\choose|binomial|factorial)\s*+[{(]*+\s*+(\d++)\s*(?:\^|\*\*)\s*+[{(]?\s*+(\d++)"
    r"|(?<!\d)(\d++)\s*(?:\^|\*\*)\s*+[{(]?\s*+(\d++)\s*+[)}]*+\s*+(?:!(?!=)|\\choose)"
)
_UNENDING = re.compile(
    r"\\(?:[io]*int|sum|prod|lim(?:sup|inf)?|bigcup|bigcap|coprod)(?![a-zA-Z])|[∫∑∏]|\b(?:integral|sum|limit)\s*\("
)


def too_much(answer: str, reference: str) -> str | None:
    """Return why an answer is not read; None if it can be.

    Args:
        answer: What stands where the answer is given.
        reference: What it is compared with: an operation without a bound may stand in both.
    """
    if len(answer) > LONGEST:
        return f"it is longer than {LONGEST} characters"
    if depth(answer) > _DEEPEST:
        return f"its brackets are nested deeper than {_DEEPEST}"
    if sum(1 for _ in _COMMAND.finditer(answer)) > _MOST_COMMANDS:
        return f"it has more than {_MOST_COMMANDS} operations"
    if _has_long_number(answer):
        return f"it has a number of more than {_LONGEST_NUMBER} digits"
    if _grows(answer):
        return _TOO_LARGE
    if _UNENDING.search(answer) is not None and _UNENDING.search(reference) is None:
        return "it is an integral, sum, product or limit that was not worked out"
    return None


def depth(text: str) -> int:
    """Return how deep brackets are nested, whether they fit together or not."""
    deepest = now = 0
    for character in text:
        if character in "([{":
            now += 1
            deepest = max(deepest, now)
        elif character in ")]}":
            now = max(0, now - 1)
    return deepest


def _never_worked_out(reference: str) -> str | None:
    """Return why a reference is compared with nothing but its own text; None if it can be worked out.

    The bounds of sums and the like look like powers and are none; the clock ends what takes too long to work them out.
    """
    if _UNENDING.search(reference) is not None or _has_long_number(reference):
        return None
    return _TOO_LARGE if _grows(reference) else None


def _has_long_number(text: str) -> bool:
    return any(len(match[0]) > _LONGEST_NUMBER for match in _NUMBER.finditer(text))


def _grows(answer: str) -> bool:
    if any(_exceeds(match[1], _LARGEST_EXPONENT) for match in _ANY_EXPONENT.finditer(answer)):
        return True
    for match in _TOWER.finditer(answer):
        base, power = match.groups()
        if _exceeds(power, _LARGEST_EXPONENT) or int(power) * len(base) > _LONGEST_EXPONENT:
            return True
    if any(_exceeds(match[1], _LARGEST_ARGUMENT) for match in _FACTORIAL.finditer(answer)):
        return True
    if any(_exceeds(match[1], _LARGEST_ARGUMENT) for match in _CHOICE.finditer(answer)):
        return True
    for match in _OF_POWER.finditer(answer):
        base, power = match[1] or match[3], match[2] or match[4]
        if _exceeds(power, _LARGEST_POWER) or _exceeds(base, _LARGEST_ARGUMENT):
            return True
        if int(base) ** int(power) > _LARGEST_ARGUMENT:
            return True
    return _is_factorial_of_factorial(answer) or _has_large_power(answer)


def _is_factorial_of_factorial(answer: str) -> bool:
    """Tell whether a factorial is taken of what holds one."""
    holds = [False]
    closed = False
    for character in answer:
        if character in "({[":
            holds.append(False)
        elif character in ")}]":
            closed = holds.pop() if len(holds) > 1 else False
            holds[-1] |= closed
            continue
        elif character == "!":
            if closed:
                return True
            holds[-1] = closed = True
            continue
        closed = closed and character == " "
    return False


def _exceeds(digits: str, bound: int) -> bool:
    return len(digits) > 12 or int(digits) > bound


_CALL = "rollgym.envs.verifiers.math_verify_call:compare"
_PLAIN_ANSWER = "$1$"
_KEPT = 1024

Judgement = Literal[
    "equal",
    "different",
    "unreadable_answer",
    "unreadable_reference",
    "comparison_timeout",
    "comparison_failed",
]
"""What came of a comparison; the last three say nothing about the answer."""


class Symbolic(NamedTuple):
    """A judgement, and why."""

    judgement: Judgement
    why: str = ""


class SymbolicComparison:
    """Has Math-Verify compare answers with references.

    An answer is never the reason that nothing is known: what is too large to be read is not read, and where a
    comparison takes too long, or breaks the process that makes it, while the reference alone is read in time, the
    answer is what could not be read.

    Args:
        processes: Comparisons that may run at a time.
        timeout_s: Wall clock of one of them.
    """

    def __init__(self, processes: int, timeout_s: float) -> None:
        self._share = PoolShare(_CALL, processes)
        self._timeout_s = timeout_s
        self._known: dict[tuple[str, str], Symbolic] = {}

    def compare(self, gold: str, answers: Mapping[str, str], options: Mapping[str, Any]) -> Symbolic:
        """Compare an answer with its reference.

        Args:
            gold: The reference.
            answers: The answer in forms of which the first that is not too much is read: each with what of it a policy
                may have made too large.
            options: Math-Verify's.
        """
        try:
            return self._compared(gold, answers, options)
        except NoProcess as missing:
            return Symbolic("comparison_failed", str(missing))

    def pids(self) -> list[int]:
        """Return the processes that are there."""
        return self._share.pool.pids()

    def close(self) -> None:
        """Give the processes back."""
        self._share.close()

    def _compared(self, gold: str, answers: Mapping[str, str], options: Mapping[str, Any]) -> Symbolic:
        if (large := _never_worked_out(gold)) is not None:
            return Symbolic("unreadable_reference", large)
        refused = ""
        for text, sent in answers.items():
            reason = too_much(text, gold)
            if reason is None:
                return self._asked(gold, sent, options)
            refused = reason
        alone = self._reference_alone(gold, options)
        return Symbolic("unreadable_answer", refused) if alone.judgement == "equal" else alone

    def _asked(self, gold: str, answer: str, options: Mapping[str, Any]) -> Symbolic:
        try:
            found = self._share.pool.call({"gold": gold, "answer": answer, **options}, self._timeout_s)
        except NoProcess:
            raise
        except (CallTimeout, CallFailed) as failure:
            alone = self._reference_alone(gold, options)
            if alone.judgement != "equal":
                return alone
            why = f"Math-Verify gave {failure}" if isinstance(failure, CallTimeout) else str(failure)
            return Symbolic("unreadable_answer", why)
        if found["equal"]:
            return Symbolic("equal")
        if found["gold"] != "expression":
            return Symbolic("unreadable_reference", "Math-Verify finds no expression in the reference")
        if found["answer"] != "expression":
            return Symbolic("unreadable_answer", "Math-Verify finds no expression in it")
        return Symbolic("different")

    def _reference_alone(self, gold: str, options: Mapping[str, Any]) -> Symbolic:
        """Return `equal` where a reference is read, and compared with itself and a number, in time; else the reason."""
        key = gold, repr(sorted(options.items()))
        known = self._known.get(key)
        if known is None:
            known = self._read_alone(gold, options)
            if len(self._known) >= _KEPT:
                self._known.clear()
            self._known[key] = known
        return known

    def _read_alone(self, gold: str, options: Mapping[str, Any]) -> Symbolic:
        try:
            found: Mapping[str, Any] = {}
            # What is equal to itself may take for ever to be worked out beside anything else.
            for answer in (gold, _PLAIN_ANSWER):
                request = {"gold": gold, "answer": answer, **options}
                # It is done once for a reference, and a busy machine must not make it the culprit.
                found = self._share.pool.call(request, 2 * self._timeout_s)
        except CallTimeout as late:
            return Symbolic("comparison_timeout", f"Math-Verify gave {late} for the reference by itself")
        except NoProcess:
            # This says nothing about the reference.
            raise
        except CallFailed as failed:
            return Symbolic("comparison_failed", str(failed))
        if found["gold"] != "expression":
            return Symbolic("unreadable_reference", "Math-Verify finds no expression in the reference")
        return Symbolic("equal")
