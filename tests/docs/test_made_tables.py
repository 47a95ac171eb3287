"""Tables of the documentation that are made: of what the code declares, and of agent libraries as measured."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from rollgym.env_server.common.settings import ServerSettings
from tests.support.processes import ROOT

SCRIPT = ROOT / "docs" / "make_tables.py"


def test_the_tables_are_as_the_code_declares_them() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--check"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_a_table_is_written_between_its_marks() -> None:
    made = runpy.run_path(str(SCRIPT))
    page = made["with_tables"]("before\n<!-- table: problems -->\n| old |\n<!-- end -->\nafter\n")
    assert page.startswith("before\n<!-- table: problems -->\n| code | status |")
    assert "| `busy` | 409 |" in page
    assert "| old |" not in page
    assert page.endswith("<!-- end -->\nafter\n")
    with pytest.raises(KeyError, match="nothing"):
        made["with_tables"]("<!-- table: nothing -->\n<!-- end -->")


def test_every_setting_of_a_server_is_in_one_table() -> None:
    made = runpy.run_path(str(SCRIPT))
    tables = [page for page in sorted((ROOT / "docs").glob("*.md")) if "settings_of_" in page.read_text()]
    shown = "".join(made["with_tables"](page.read_text()) for page in tables)
    rows = {name: shown.count(f"| `{name}`") for name in ServerSettings.model_fields}
    assert {name for name, count in rows.items() if count != 1} == set()
    assert "| `register_with` (`--register`) | none |" in shown
    assert "| `idle_timeout_s` | 3600 |" in shown


def test_an_empty_cell_is_a_cell() -> None:
    made = runpy.run_path(str(SCRIPT))
    assert made["table"](("a", "b"), [("1", ""), ("", "2")]) == "| a | b |\n|---|---|\n| 1 | |\n| | 2 |\n"


MADE = runpy.run_path(str(Path(__file__).parents[2] / "peers" / "agents" / "library_table.py"))

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
        "run python peers/agents/library_table.py"
    )


def test_every_record_was_equal_to_the_engines_log():
    results = json.loads(RESULTS.read_text())
    played = [name for name, found in results.items() if found.get("calls")]
    assert len(played) >= 25
    assert set(results) == set(MADE["players"]()), "run python peers/agents/libraries.py"
    assert all(results[name]["record_equals_log"] for name in played)


def test_a_row_tells_what_worked_and_what_was_refused():
    assert table({"smolagents": MEASURED}).splitlines()[2] == (
        "| smolagents 1.26.0 | tools, structured: no | chat/completions 3, chat/completions (stream) 1, "
        "tool_choice: required 2 | 2 | `tool_choice` | 1 × 400 response_format: a/b | 3 | equal |"
    )


def test_a_library_that_differs_stands_out():
    assert "**differs**" in table({"x": MEASURED | {"record_equals_log": False}})
    assert "cannot be installed" in table({"x": {"library": "x", "not_installed": "needs Python 3.12"}})
