"""Countdown-v0: make a target out of some numbers, each used once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Annotated, Any, NamedTuple, Unpack

import numpy as np
from pydantic import Field

from rollgym.envs.core.splits import Split, TaskSplit, checked_split, split_of_text
from rollgym.envs.core.text_game import GameKwargs, Move, Refusal, TextGame
from rollgym.envs.games.countdown_numbers import ExpressionError, draw_sum, evaluate, solve, take_apart

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
            value, text = draw_sum(generator, numbers[:used])
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
