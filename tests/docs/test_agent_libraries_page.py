"""The page of agent libraries is made of what was measured."""

import json
import runpy
from pathlib import Path

MADE = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "agents" / "library_table.py"))
PAGE, RESULTS, page_with, table = (MADE[name] for name in ("PAGE", "RESULTS", "page_with", "table"))

MEASURED = {
    "library": "smolagents[openai]",
    "version": "1.26.0",
    "parts": {"tools": "3", "structured": "failed: BadRequestError"},
    "requests": {"/v1/chat/completions": 3, "/v1/chat/completions (stream)": 1},
    "forms": {"tool_choice: required": 2},
    "held": 2,
    "fields": ["messages"],
    "ignored": ["tool_choice"],
    "refused": {"400 response_format: a|b": 1},
    "calls": 3,
    "record_equals_log": True,
}


def test_the_page_shows_what_was_measured():
    assert page_with(PAGE.read_text(), table(json.loads(RESULTS.read_text()))) == PAGE.read_text(), (
        "run python benchmarks/agents/library_table.py"
    )


def test_every_record_was_equal_to_the_engines_log():
    results = json.loads(RESULTS.read_text())
    played = [name for name, found in results.items() if found.get("calls")]
    assert len(played) >= 25
    assert set(results) == set(MADE["players"]()), "run python benchmarks/agents/libraries.py"
    assert all(results[name]["record_equals_log"] for name in played)


def test_a_row_tells_what_worked_and_what_was_refused():
    assert table({"smolagents": MEASURED}).splitlines()[2] == (
        "| smolagents 1.26.0 | tools, structured: no | chat/completions 3, chat/completions (stream) 1, "
        "tool_choice: required 2 | 2 | `tool_choice` | 1 × 400 response_format: a/b | 3 | equal |"
    )


def test_a_library_that_differs_stands_out():
    assert "**differs**" in table({"x": MEASURED | {"record_equals_log": False}})
    assert "cannot be installed" in table({"x": {"library": "x", "not_installed": "needs Python 3.12"}})
