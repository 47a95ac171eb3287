"""What of an answer is too much to be read: forms whose value, or whose reading, grows out of all bounds.

A policy may write whatever it likes. What is refused here costs a look at each character; the rest is ended by a clock.
"""

import re

from rollgym.envs.verifiers.powers import has_large_power

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
_EXPONENT = re.compile(r"(?:\^|\*\*)[\s{(]*+[-+]?+\s*+(?:\\[dt]?frac[\s{]*+)?(\d++)")
# A power that stands in an exponent.
_TOWER = re.compile(r"(?:\^|\*\*)\s*[{(]*\s*(\d+)\s*[})]?\s*(?:\^|\*\*)\s*[{(]*\s*(\d+)")
_FACTORIAL = re.compile(r"(\d+)\s*[)}]*\s*!(?!=)")
_CHOICE = re.compile(r"(?:\\[dt]?binom|\\choose|binomial|factorial)\s*[{(]?\s*(\d+)")
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


def never_worked_out(reference: str) -> str | None:
    """Return why a reference is compared with nothing but its own text; None if it can be worked out.

    The bounds of sums and the like are written as powers are, and are none: whoever works them out is ended by a clock.
    """
    if _UNENDING.search(reference) is not None or _has_long_number(reference):
        return None
    return _TOO_LARGE if _grows(reference) else None


def _has_long_number(text: str) -> bool:
    return any(len(match[0]) > _LONGEST_NUMBER for match in _NUMBER.finditer(text))


def _grows(answer: str) -> bool:
    if any(_exceeds(match[1], _LARGEST_EXPONENT) for match in _EXPONENT.finditer(answer)):
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
    return _is_factorial_of_factorial(answer) or has_large_power(answer)


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
