"""Responses that keep the rules of drawn tasks of form: an oracle that the rules share nothing with."""

import itertools
import json
import re
from typing import Any

_SCRIPTS = {"Greek": "ήλιος", "Cyrillic": "солнце"}


def answer(task: dict[str, Any]) -> str:
    rules = {rule["rule"]: rule for rule in task["rules"]}
    if "think_answer" in rules:
        return "<think>I compare them.</think>\n<answer>the first</answer>"
    if "single_boxed" in rules:
        return "I like it since it is my lucky number: \\boxed{12}"
    if "json_schema" in rules:
        return json.dumps(_instance(rules["json_schema"]["schema"]))
    if "regex" in rules:
        return _written(rules["regex"]["pattern"])
    if "script" in rules:
        return " ".join([_SCRIPTS[rules["script"]["script"]]] * rules["length_within"]["least"])
    return " ".join(f"word{number}" for number in range(rules["length_within"]["least"]))


def _instance(schema: dict[str, Any]) -> Any:
    if schema["type"] == "object":
        return {name: _instance(part) for name, part in schema["properties"].items()}
    if schema["type"] == "array":
        return [f"tag {number}" for number in range(schema["minItems"])]
    return schema["minimum"] if schema["type"] == "integer" else "abc"


def _written(pattern: str) -> str:
    """Write a text of the form that a pattern of single characters, sets and counts describes."""
    parts = re.findall(r"(\[.|.)(?:-.\])?(?:\{(\d+)\})?", pattern)
    return "".join(itertools.chain.from_iterable(start[-1] * int(count or 1) for start, count in parts))
