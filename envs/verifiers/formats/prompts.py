"""Tasks of form, drawn from a seed: to learn from without a file of data."""

from collections.abc import Callable, Sequence
from typing import Any

from numpy.random import Generator

from rollgym.envs.verifiers.instructions.prompts import between, one_of

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
        f"Invent a {one_of(draw, _RECORDS)}. Describe it by one JSON object and nothing else, with exactly these keys: "
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
    thing = one_of(draw, _THINGS)
    said = f"Describe {thing} in {least} to {most} words, without saying the same thing again and again."
    rules = [
        {"rule": "length_within", "least": least, "most": most},
        {"rule": "repetition", "n": 3, "least": 0.9},
        {"rule": "long_block", "most": 100},
    ]
    return said, rules


def _foreign(draw: Generator) -> Drawn:
    script, least = one_of(draw, _OTHER_SCRIPTS), between(draw, 5, 15)
    said = f"Write about {one_of(draw, _THINGS)} in {_LANGUAGES[script]} only, in at least {least} words."
    rules = [
        {"rule": "script", "script": script, "least": 0.95},
        {"rule": "length_within", "least": least, "most": 300},
    ]
    return said, rules


def _sample(draw: Generator, choices: Sequence[str], count: int) -> list[str]:
    return [choices[int(index)] for index in draw.choice(len(choices), size=count, replace=False)]


FAMILIES: dict[str, Callable[[Generator], Drawn]] = {
    "thinking": _thinking,
    "boxed": _boxed,
    "record": _record,
    "code": _code,
    "description": _description,
    "foreign": _foreign,
}
"""Families of tasks by their names."""


def draw_form(draw: Generator, families: Sequence[str]) -> dict[str, Any]:
    """Draw a task of one of some families: its `prompt` and its `rules`."""
    prompt, rules = FAMILIES[one_of(draw, families)](draw)
    return {"prompt": prompt, "rules": rules}
