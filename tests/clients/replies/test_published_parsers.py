"""Our readers of calls and thinking, held against what published parsers read in the same texts.

`peers/calls/published_parsers.py` writes the record; what is read otherwise is a choice that the docs name.
"""

import json
from pathlib import Path

import pytest

from tests.support.published_readings import our_reading

ROOT = Path(__file__).parents[3]
RECORD = json.loads((ROOT / "benchmarks/results/published_parsers.json").read_text(encoding="utf-8"))
PAGE = (ROOT / "docs/environments/tool_call_formats.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("family", RECORD["texts_by_family"])
def test_what_published_parsers_read_is_read_alike_or_is_a_choice(family):
    texts = [each for each in RECORD["texts"] if each["family"] == family]
    assert len(texts) == RECORD["texts_by_family"][family] >= 20
    apart = {
        each["name"]
        for each in texts
        if our_reading(family, each["text"], RECORD["schemas"]) != each["theirs"]
    }
    assert apart == {each["name"] for each in texts if "choice" in each}


def test_the_docs_name_every_choice_and_how_often_it_was_met():
    assert len(RECORD["texts"]) >= 400
    for choice, times in RECORD["by_choice"].items():
        assert f"| {choice} | {times} |" in PAGE
