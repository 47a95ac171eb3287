"""Format-v0: the form of a response, whatever it says."""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from envs.kwargs import OneOf, RenderMode, SomeOf
from envs.splits import TaskSplit, checked_split, split_of_text
from envs.verifiers.arguments import count
from envs.verifiers.base import Verdict, VerifierEnv
from envs.verifiers.formats.prompts import FAMILIES, draw_form
from envs.verifiers.formats.reply import Reply
from envs.verifiers.formats.rules import Wanted, rate, read_rules
from envs.verifiers.patterns import TooMuchWorkError

Reward = Literal["product", "mean"]

_REWARDS = ("product", "mean")
_TRIES = 10_000
_KEPT = 1.0 - 1e-6


class FormatEnv(VerifierEnv):
    """The form of a response: tags, boxes, JSON by a schema, patterns, length, repetition, script.

    A task has `rules`; how well each is kept is between 0 and 1. A task may say `reward` for itself.

    Raises:
        ValueError: If an argument makes no sense.
    """

    metadata: dict[str, Any] = VerifierEnv.metadata | {
        "description": "The form of a response: tags, JSON by a schema, patterns, length, repetition, script.",
        "observation": "What is to be written, and in which form.",
        "reward": "The product of how well each rule is kept, or their weighted mean with `reward: mean`.",
        # Schemas and patterns come from whoever wrote the task.
        "inline": False,
    }

    def __init__(
        self,
        *,
        reward: Annotated[
            Reward,
            OneOf(*_REWARDS),
            Field(
                description=(
                    "`product` pays nothing where a rule is broken altogether; `mean` weighs rules by "
                    "their `weight`."
                )
            ),
        ] = "product",
        families: Annotated[
            Sequence[str],
            SomeOf(*FAMILIES),
            Field(
                description=(
                    "Which kinds of tasks are drawn: thinking, boxed, record, code, description, foreign;"
                    " all if unset."
                )
            ),
        ] = tuple(FAMILIES),
        split: TaskSplit = None,
        render_mode: RenderMode = None,
    ) -> None:
        super().__init__(render_mode=render_mode)
        self._reward: str = reward
        self._families = tuple(families)
        self._split = checked_split(split)

    def draw_task(self) -> dict[str, Any]:
        """Draw a task of the wanted split."""
        for _ in range(_TRIES):
            task = draw_form(self.np_random, self._families)
            if self._split is None or split_of_text(task["prompt"]) == self._split:
                return task
        raise ValueError(f"no task of split {self._split} in {_TRIES} tries: allow more families")

    def checked_task(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return a task whose rules are known."""
        self._read(fields)
        if not isinstance(fields.get("prompt"), str):
            raise ValueError("a task needs the field 'prompt': what the policy is asked")
        return dict(fields)

    def prompt(self, task: Mapping[str, Any]) -> str:
        """Return the prompt."""
        return str(task["prompt"])

    def instruction(self) -> str:
        """Return how to answer."""
        return (
            "Do what the prompt asks for, in exactly the form that it asks for. A program checks the form of your "
            "whole response, so write nothing but the response itself."
        )

    def score(self, response: str, task: Mapping[str, Any]) -> Verdict:
        """Hold every rule of a task against a response."""
        try:
            rules, reward, tokens = self._read(task)
            rates = rate(Reply(response, tokens), rules)
        except ValueError as error:
            return Verdict(0.0, "error", str(error))
        except TooMuchWorkError as error:
            return Verdict(0.0, "timeout", str(error))
        if not response.strip():
            return Verdict(0.0, "unparsable", "the response is blank")
        score = math.prod(rates) if reward == "product" else _mean(rates, rules)
        detail = ", ".join(f"{each.name} {value:.3g}" for each, value in zip(rules, rates, strict=True))
        if score >= _KEPT:
            return Verdict(1.0, "correct", detail)
        return Verdict(score, "partial", detail) if score > 0 else Verdict(0.0, "wrong", detail)

    def _read(self, task: Mapping[str, Any]) -> tuple[list[Wanted], str, int | None]:
        rules = read_rules(task.get("rules"))
        reward = _checked_reward(task.get("reward", self._reward))
        if reward == "product" and any(rule.weight != 1.0 for rule in rules):
            raise ValueError("rules have a weight in a mean only: say reward 'mean'")
        tokens = task.get("tokens")
        return rules, reward, None if tokens is None else count(tokens)


def _mean(rates: Sequence[float], rules: Sequence[Wanted]) -> float:
    weights = [rule.weight for rule in rules]
    return sum(value * weight for value, weight in zip(rates, weights, strict=True)) / sum(weights)


def _checked_reward(value: Any) -> str:
    if value not in _REWARDS:
        raise ValueError(f"reward must be one of {', '.join(_REWARDS)}, not {str(value)[:80]!r}")
    return str(value)
