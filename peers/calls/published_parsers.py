"""Hold our readers of calls and thinking against what vLLM's parsers read, and say why each difference is there.

    PYTHONPATH=. PYTHON -m peers.calls.record_vllm_calls --out CASES   # where vLLM is
    PYTHONPATH=. python peers/calls/published_parsers.py CASES --out RESULT

A difference without a choice fails, and so does a choice without a difference. What each choice is for stands in
docs/environments/tool_call_formats.md, and
RESULT is benchmarks/results/published_parsers.json.
"""

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from peers.calls.call_texts import TOOLS
from tests.support.published_readings import our_reading, their_reading

_JSON_NAMES = ("a comma too many", "single quotation marks", "a line end in a text", "no JSON")
CHOICES: dict[str, dict[str, tuple[str, ...]]] = {
    "a mark of the format in a text": {
        "hermes": ("put with the closing mark of hermes",),
        "qwen-xml": ("put with the closing mark of a parameter", "put with the closing mark of a function"),
        "mistral": ("put with the mark of mistral",),
        "mistral-named": ("put with the mark of mistral",),
    },
    "text behind calls, or between them": {
        "hermes": ("text behind", "in a fence", "text between two calls"),
        "qwen-xml": ("text behind", "in a fence"),
        "llama": ("text behind",),
        "mistral": ("text behind", "in a fence", "text behind the list"),
        "mistral-named": ("text behind", "in a fence"),
    },
    "arguments as JSON text": {"hermes": ("arguments as JSON text",), "llama": ("arguments as JSON text",)},
    "arguments that are no object": {
        "hermes": ("arguments that are a list", "arguments that are null"),
        "llama": ("arguments that are a list", "arguments that are null"),
        "mistral": ("arguments that are a list", "arguments that are null"),
        "mistral-named": ("arguments that are a list", "no arguments"),
    },
    "numbers that JSON does not have": {
        "hermes": ("NaN", "a number beyond all bounds"),
        "llama": ("NaN", "a number beyond all bounds"),
        "mistral": ("NaN", "a number beyond all bounds"),
        "mistral-named": ("NaN",),
    },
    "no arguments": {"hermes": ("no arguments",), "llama": ("no arguments",)},
    "`parameters` for `arguments`": {
        "hermes": ("the other word for arguments",),
        "mistral": ("the other word for arguments",),
    },
    "a bad call beside a good one": {"hermes": ("a bad call beside a good one",)},
    "a call that cannot be read": {
        "qwen-xml": ("JSON in it", "no name"),
        "mistral": (*_JSON_NAMES, "cut off", "cut off before its last mark", "no name"),
        "mistral-named": ("a comma too many", "cut off", "cut off before its last mark"),
    },
    "a value that is cut off": {"qwen-xml": ("cut off",)},
    "no `<tool_call>`": {"qwen-xml": ("no tool_call",)},
    "literals of Python as values": {"qwen-xml": ("an object of Python",)},
    "blanks in names": {"qwen-xml": ("blanks in names",)},
    "a bare call in a text": {"llama": ("text before", "in a fence")},
    "a list without its mark": {"mistral": ("a list without the mark",)},
    "`[CALL_ID]`": {"mistral-named": ("an id",)},
    "what stands around a list of Python": {
        "python": ("blanks around", "in a fence", "no brackets", "the mark before it", "several lines")
    },
    "names with dots": {"python": ("a dotted name",)},
    "sets": {"python": ("a set",)},
    "a parameter that is there twice": {"python": ("a name that is there twice",)},
    "tags in what is thought": {
        "thinking": (
            *("thinking twice", "thinking in thinking"),
            *("a closing tag in quotation marks", "a closing tag in a fence"),
        )
    },
    "other tags of thinking": {"thinking": ("other tags", "capital letters")},
}
"""Which texts are read otherwise on purpose: by the choice, by family."""


def main() -> None:
    """Compare, print and write."""
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("cases", type=Path)
    arguments.add_argument("--out", type=Path, required=True)
    given = arguments.parse_args()
    record = json.loads(given.cases.read_text(encoding="utf-8"))
    chosen = {
        (family, name): choice
        for choice, families in CHOICES.items()
        for family, names in families.items()
        for name in names
    }
    texts = [_compared(each, chosen.get((each["family"], each["name"]))) for each in record["texts"]]
    wrong = [each for each in texts if each["alike"] == ("choice" in each)]
    for each in wrong:
        print(
            f"{each['family']}, {each['name']}: {each['text']!r}\n  {each['theirs']}\n  {each.get('choice')}"
        )
    alike, number = Counter[str](), Counter[str]()
    for each in texts:
        number[each["family"]] += 1
        alike[each["family"]] += each.pop("alike")
    summary = {
        "vllm": record["vllm"],
        "parsers": record["parsers"],
        "schemas": TOOLS,
        "texts_by_family": dict(number),
        "read_alike": dict(alike),
        "by_choice": dict(Counter(each["choice"] for each in texts if "choice" in each)),
    }
    given.out.write_text(json.dumps({**summary, "texts": texts}, indent=1) + "\n", encoding="utf-8")
    print(f"{sum(alike.values())} of {len(texts)} are read alike; {dict(alike)} of {dict(number)}")
    sys.exit(bool(wrong))


def _compared(recorded: dict[str, Any], choice: str | None) -> dict[str, Any]:
    theirs = their_reading(recorded)
    alike = our_reading(recorded["family"], recorded["text"], TOOLS) == theirs
    told = {key: recorded[key] for key in ("family", "name", "text")}
    return {**told, "theirs": theirs, **({} if choice is None else {"choice": choice}), "alike": alike}


if __name__ == "__main__":
    main()
