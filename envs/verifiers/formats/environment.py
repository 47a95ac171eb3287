"""Format-v0: the form of a response, whatever it says."""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from rollgym.envs.core.kwargs import OneOf, RenderMode, SomeOf
from rollgym.envs.core.splits import TaskSplit
from rollgym.envs.verifiers.arguments import count
from rollgym.envs.verifiers.base import Verdict
from rollgym.envs.verifiers.formats.prompts import FAMILIES, draw_form
from rollgym.envs.verifiers.formats.reply import Reply
from rollgym.envs.verifiers.formats.rules import Wanted, rate, read_rules
from rollgym.envs.verifiers.ruled import RuledVerifier, one_of

Reward = Literal["product", "mean"]

_REWARDS = ("product", "mean")
_KEPT = 1.0 - 1e-6


class FormatEnv(RuledVerifier):
    """The form of a response: tags, boxes, JSON by a schema, patterns, length, repetition, script.

    A task has `rules`; how well each is kept is between 0 and 1. A task may say `reward` for itself.

    Raises:
        ValueError: If an argument makes no sense.
    """

    metadata: dict[str, Any] = RuledVerifier.metadata | {
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
        super().__init__(split=split, render_mode=render_mode)
        self._reward: str = reward
        self._families = tuple(families)

    def draw_prompt(self) -> dict[str, Any]:
        """Draw a task of the wanted families."""
        return draw_form(self.np_random, self._families)

    def check_rules(self, fields: Mapping[str, Any]) -> None:
        """Look at the rules, and at what is paid for them."""
        self._read(fields)

    def instruction(self) -> str:
        """Return how to answer."""
        return (
            "Do what the prompt asks for, in exactly the form that it asks for. A program checks the form of your "
            "whole response, so write nothing but the response itself."
        )

    def rate(self, response: str, task: Mapping[str, Any]) -> Verdict:
        """Return the product or the mean of how well each rule is kept."""
        rules, reward, tokens = self._read(task)
        rates = rate(Reply(response, tokens), rules)
        score = math.prod(rates) if reward == "product" else _mean(rates, rules)
        detail = ", ".join(f"{each.name} {value:.3g}" for each, value in zip(rules, rates, strict=True))
        if score >= _KEPT:
            return Verdict(1.0, "correct", detail)
        return Verdict(score, "partial", detail) if score > 0 else Verdict(0.0, "wrong", detail)

    def _read(self, task: Mapping[str, Any]) -> tuple[list[Wanted], str, int | None]:
        rules = read_rules(task.get("rules"))
        reward = one_of("reward", task.get("reward", self._reward), _REWARDS)
        if reward == "product" and any(rule.weight != 1.0 for rule in rules):
            raise ValueError("rules have a weight in a mean only: say reward 'mean'")
        tokens = task.get("tokens")
        return rules, reward, None if tokens is None else count(tokens)


def _mean(rates: Sequence[float], rules: Sequence[Wanted]) -> float:
    weights = [rule.weight for rule in rules]
    return sum(value * weight for value, weight in zip(rates, weights, strict=True)) / sum(weights)
