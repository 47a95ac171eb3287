"""Format-v0: the form of a response, whatever it says."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

from numpy.random import Generator
from pydantic import Field

from rollgym.envs.core.kwargs import OneOf, RenderMode, SomeOf
from rollgym.envs.core.splits import TaskSplit
from rollgym.envs.verifiers.arguments import count
from rollgym.envs.verifiers.base import Verdict
from rollgym.envs.verifiers.formats.rules import ReadReply, Wanted, rate, read_rules
from rollgym.envs.verifiers.instructions.prompts import between, pick
from rollgym.envs.verifiers.ruled import RuledVerifier, one_of

FAMILIES = ("thinking", "boxed", "record", "code", "description", "foreign")
"""Families of tasks."""
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
        # Schemas and patterns come from the author of the task.
        "inline": False,
        "example_reply": "Ночной поезд тихо шёл через лес, и в окнах долго мерцали далёкие огни.",
        "baselines": {"random": 0, "constant action": 0},
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
        ] = FAMILIES,
        split: TaskSplit = None,
        render_mode: RenderMode = None,
    ) -> None:
        super().__init__(split=split, render_mode=render_mode)
        self._reward: str = reward
        self._families = tuple(families)

    def generate_task(self) -> dict[str, Any]:
        """Draw a task of the wanted families."""
        prompt, rules = _MAKERS[pick(self.np_random, self._families)](self.np_random)
        return {"prompt": prompt, "rules": rules}

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
        rates = rate(ReadReply(response, tokens), rules)
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


_THINGS = (
    *("a lighthouse", "an old bicycle", "the first snow", "a night train", "a village market", "the sea"),
    *("a small library", "a broken bridge", "the moon", "a garden at dawn", "a paper boat", "a mountain hut"),
)
_RECORDS = ("book", "city", "recipe", "planet", "painting", "song", "bird", "ship", "museum", "film")
_TEXTS = ("title", "name", "summary", "place", "owner", "motto")
_NUMBERS = ("year", "pages", "rooms", "weight", "rank", "minutes")
_PIECES = (
    ("{n} capital letters from A to Z", "[A-Z]{{{n}}}"),
    ("{n} digits", "[0-9]{{{n}}}"),
    ("{n} lower-case letters from a to z", "[a-z]{{{n}}}"),
    ("{n} letters A", "A{{{n}}}"),
)
_JOINTS = (("a hyphen", "-"), ("a slash", "/"), ("a colon", ":"), ("an underscore", "_"))
_NUMBER_WORDS = ("two", "three", "four", "five", "six")
_OTHER_SCRIPTS = ("Greek", "Cyrillic")
_LANGUAGES = {"Greek": "Greek", "Cyrillic": "Russian"}

Drawn = tuple[str, list[dict[str, Any]]]


def _thinking(draw: Generator) -> Drawn:
    left, right = between(draw, 10, 999), between(draw, 10, 999)
    said = (
        f"Which is larger, {left} or {right}? Reason between the tags <think> and </think>, then answer between the "
        "tags <answer> and </answer>. Use each tag once, and write nothing outside of them."
    )
    return said, [{"rule": "think_answer"}]


def _boxed(draw: Generator) -> Drawn:
    low = between(draw, 1, 800)
    said = (
        f"Name a whole number between {low} and {low + between(draw, 10, 90)}, and say why you like it. Put the "
        "number into a LaTeX box (the command boxed, with braces), and use that command exactly once."
    )
    return said, [{"rule": "single_boxed"}, {"rule": "length_within", "least": 8, "most": 200}]


def _record(draw: Generator) -> Drawn:
    properties: dict[str, Any] = {}
    said = []
    for name in _sample(draw, _TEXTS, between(draw, 1, 3)):
        longest = 10 * between(draw, 2, 6)
        properties[name] = {"type": "string", "minLength": 1, "maxLength": longest}
        said.append(f'"{name}", a string of at most {longest} characters')
    for name in _sample(draw, _NUMBERS, between(draw, 1, 2)):
        low = between(draw, 1, 500)
        high = low + between(draw, 5, 500)
        properties[name] = {"type": "integer", "minimum": low, "maximum": high}
        said.append(f'"{name}", an integer from {low} to {high}')
    count = between(draw, 2, 4)
    properties["tags"] = {
        **{"type": "array", "items": {"type": "string"}},
        **{"minItems": count, "maxItems": count, "uniqueItems": True},
    }
    said.append(f'"tags", an array of exactly {count} different strings')
    schema = {
        **{"type": "object", "properties": properties},
        **{"required": sorted(properties), "additionalProperties": False},
    }
    prompt = (
        f"Invent a {pick(draw, _RECORDS)}. Describe it by one JSON object and nothing else, with exactly these keys: "
        f"{'; '.join(said)}."
    )
    return prompt, [{"rule": "json_schema", "schema": schema}]


def _code(draw: Generator) -> Drawn:
    said, pattern = [], ""
    for number in range(between(draw, 2, 3)):
        if number:
            words, sign = _JOINTS[int(draw.integers(len(_JOINTS)))]
            said.append(words)
            pattern += sign
        words, form = _PIECES[int(draw.integers(len(_PIECES)))]
        count = between(draw, 2, 6)
        said.append(words.format(n=_NUMBER_WORDS[count - 2]))
        pattern += form.format(n=count)
    prompt = f"Make up a code of this form: {', then '.join(said)}. Reply with the code alone."
    return prompt, [{"rule": "regex", "pattern": pattern, "whole": True}]


def _description(draw: Generator) -> Drawn:
    least = 10 * between(draw, 4, 9)
    most = least + 10 * between(draw, 2, 4)
    thing = pick(draw, _THINGS)
    said = f"Describe {thing} in {least} to {most} words, without saying the same thing again and again."
    rules = [
        {"rule": "length_within", "least": least, "most": most},
        {"rule": "repetition", "n": 3, "least": 0.9},
        {"rule": "long_block", "most": 100},
    ]
    return said, rules


def _foreign(draw: Generator) -> Drawn:
    script, least = pick(draw, _OTHER_SCRIPTS), between(draw, 5, 15)
    said = f"Write about {pick(draw, _THINGS)} in {_LANGUAGES[script]} only, in at least {least} words."
    rules = [
        {"rule": "script", "script": script, "least": 0.95},
        {"rule": "length_within", "least": least, "most": 300},
    ]
    return said, rules


def _sample(draw: Generator, choices: Sequence[str], count: int) -> list[str]:
    return [choices[int(index)] for index in draw.choice(len(choices), size=count, replace=False)]


_MAKERS: Mapping[str, Callable[[Generator], Drawn]] = dict(
    zip(FAMILIES, (_thinking, _boxed, _record, _code, _description, _foreign), strict=True)
)
