"""Tables of the documentation that are made from what the code declares."""

import runpy
import subprocess
import sys

import pytest

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


def test_an_empty_cell_is_a_cell() -> None:
    made = runpy.run_path(str(SCRIPT))
    assert made["table"](("a", "b"), [("1", ""), ("", "2")]) == "| a | b |\n|---|---|\n| 1 | |\n| | 2 |\n"
