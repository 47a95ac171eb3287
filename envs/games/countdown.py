"""Countdown-v0: make a target out of some numbers, each used once.

Sums are read without `eval`, drawn at random, and solved exactly if a solution exists.
"""

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import combinations, count
from typing import Annotated, Any, NamedTuple, Unpack

import numpy as np
from pydantic import Field

from rollgym.envs.core.splits import Split, TaskSplit, checked_split, split_of_text
from rollgym.envs.core.text_game import GameKwargs, Move, Refusal, TextGame

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


def _draw_sum(generator: np.random.Generator, numbers: list[int]) -> tuple[Fraction, str]:
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


# About twenty milliseconds: other sessions in the process wait.
_TRIES, _BUILT = 400, 200
_MOST_LOOKS = 10_000
_MOST_NUMBERS, _LARGEST = 6, 10_000


class CountdownEnv(TextGame[str]):
    """Numbers, a target, and the four operations; each attempt is an expression, and the reply is its value.

    Values are exact: a division need not come out even on the way. Each task has a solution.

    Raises:
        ValueError: If an argument is invalid.
    """

    metadata: dict[str, Any] = TextGame.metadata | {
        "reset_options": ["expert", "numbers", "split", "target"],
        "description": "Make a target out of given numbers with + - * / and parentheses.",
        "observation": "The numbers, the target, and the attempts so far with their values.",
        "actions": "One expression with the numbers, `+ - * /` and parentheses.",
        "reward": "1 when the value is the target exactly, else 0.",
        "max_episode_steps": 5,
        "baselines": {"random": 0, "constant action": 0, "blind": 0, "expert": 1},
    }

    def __init__(
        self,
        *,
        count: Annotated[int, Field(ge=2, le=_MOST_NUMBERS, description="Numbers of a task.")] = 4,
        largest: Annotated[int, Field(ge=2, le=_LARGEST, description="The largest number.")] = 20,
        target: Annotated[
            Sequence[Annotated[int, Field(ge=1, le=_LARGEST)]],
            Field(min_length=2, max_length=2, description="Least and greatest target."),
        ] = (10, 100),
        use_all: Annotated[
            bool, Field(description="Whether each number has to be used, or some may be left.")
        ] = True,
        split: TaskSplit = None,
        max_episode_steps: Annotated[int, Field(ge=1, description="Attempts.")] = 5,
        **common: Unpack[GameKwargs],
    ) -> None:
        super().__init__(
            "one expression with the numbers and + - * / ( )",
            "(1 + 2) * 3",
            max_episode_steps=max_episode_steps,
            **common,
        )
        if target[0] > target[1]:
            raise ValueError(f"target must be its least and its greatest value, not {target}")
        self._count = count
        self._largest = largest
        self._targets = (int(target[0]), int(target[1]))
        self._use_all = use_all
        self._split = checked_split(split)
        wishes = Wishes(count, largest, self._targets, use_all)
        self._wishes = wishes
        if example_task(wishes, self._split) is None:
            raise ValueError(
                f"no task with {count} numbers up to {largest}, a target from {target[0]} to {target[1]} and split "
                f"{split} was found ({count} numbers up to {largest} make at most {largest**count}): widen target, or "
                "take more or larger numbers"
            )
        self._numbers: list[int] = []
        self._target = 0
        self._solution: str | None = None
        self._attempts: list[str] = []

    def start_episode(self, options: Mapping[str, Any]) -> None:
        self._attempts = []
        if "numbers" in options or "target" in options:
            self._numbers, self._target = _checked_task(options)
            self._solution = solve(self._numbers, self._target, use_all=self._use_all, most=_MOST_LOOKS)
        else:
            self._draw(options)

    def _draw(self, options: Mapping[str, Any]) -> None:
        split = checked_split(options.get("split", self._split))
        task = draw_task(self.np_random, self._wishes, split) or example_task(self._wishes, split)
        if task is None:
            raise ValueError(
                f"no task of split {split} was found: widen target, or take more or larger numbers"
            )
        self._numbers, self._target, self._solution = sorted(task.numbers), task.target, task.solution

    def parse_action(self, text: str) -> str | Refusal:
        expression = text.split("=")[0].strip("\"'`“”‘’ \t\r\n")
        try:
            _, used = evaluate(expression)
        except ExpressionError as error:
            return Refusal(str(error))
        left = list(self._numbers)
        for number in used:
            if number not in left:
                return Refusal(f"{number} is none of the numbers, or is used too often.")
            left.remove(number)
        if self._use_all and left:
            return Refusal(f"{_listed(left)} must be used, too.")
        return expression

    def apply_action(self, action: str) -> Move:
        value, _ = evaluate(action)
        self._attempts.append(f"{action} = {value}")
        solved = value == self._target
        return Move(float(solved), solved, solved)

    def draw_board(self) -> str:
        return "\n".join([f"Numbers: {_listed(self._numbers)}", f"Target: {self._target}", *self._attempts])

    def state_info(self) -> dict[str, Any]:
        # An attempt changes nothing: the task is all of the state.
        state = {"numbers": list(self._numbers), "target": self._target, "attempts": list(self._attempts)}
        return {"anchor": "0", "state": state}

    def describe_rules(self) -> str:
        which = "every number exactly once" if self._use_all else "each number at most once"
        return (
            "Write an expression whose value is the target. Use "
            f"{which}, with + - * / and parentheses. A wrong attempt is told its value."
        )

    def optimal_steps(self) -> int | None:
        return None if self._solution is None else 1

    def expert_reply(self) -> str:
        return self._solution or _listed(self._numbers)


@dataclass(frozen=True, slots=True)
class Wishes:
    """The wanted kind of tasks; as of `CountdownEnv`."""

    count: int
    largest: int
    targets: tuple[int, int]
    use_all: bool


class DrawnTask(NamedTuple):
    """Numbers, what is to be made of them, and how."""

    numbers: tuple[int, ...]
    target: int
    solution: str


def draw_task(generator: np.random.Generator, wishes: Wishes, split: Split | None) -> DrawnTask | None:
    """Join numbers at random until their value is a target; if targets are rare, decompose one into numbers.

    Returns:
        A task of the split; None if none was found soon.
    """
    least, greatest = wishes.targets
    for attempt in range(_TRIES + _BUILT):
        numbers = generator.integers(1, wishes.largest + 1, wishes.count).tolist()
        used = wishes.count if wishes.use_all else int(generator.integers(2, wishes.count + 1))
        if attempt < _TRIES:
            value, text = _draw_sum(generator, numbers[:used])
            if value.denominator != 1 or not least <= value <= greatest:
                continue
        else:
            value = Fraction(int(generator.integers(least, greatest + 1)))
            built = take_apart(generator, int(value), used, wishes.largest)
            if built is None:
                continue
            numbers[:used], text = built
        if split is None or split_of_text(f"{sorted(numbers)} {value}") == split:
            return DrawnTask(tuple(numbers), int(value), text)
    return None


@lru_cache(maxsize=256)
def example_task(wishes: Wishes, split: Split | None) -> DrawnTask | None:
    """Return a task that fits, always the same one; None if the options contradict each other."""
    return draw_task(np.random.default_rng(0), wishes, split)


def _checked_task(options: Mapping[str, Any]) -> tuple[list[int], int]:
    numbers, target = options.get("numbers"), options.get("target")
    given = [*numbers, target] if isinstance(numbers, list | tuple) else []
    if not 3 <= len(given) <= _MOST_NUMBERS + 1 or not all(
        type(each) is int and 1 <= each <= _LARGEST for each in given
    ):
        raise ValueError(
            f"a task needs both options: numbers, a list of 2 to {_MOST_NUMBERS} whole numbers, and target, a whole "
            f"number, all from 1 to {_LARGEST}"
        )
    return sorted(given[:-1]), given[-1]


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
