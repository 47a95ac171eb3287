"""The notebooks in docs/tutorials run from their first cell to their last, in an empty folder."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import ROOT

NOTEBOOKS = sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(notebook: Path, tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "tests.support.notebooks", str(notebook)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_small_and_shows_what_it_printed(notebook: Path) -> None:
    text = notebook.read_text(encoding="utf-8")
    assert len(text) < 50_000
    cells = json.loads(text)["cells"]
    assert cells[0]["source"][0].startswith("# ")
    assert any(cell.get("outputs") for cell in cells)
    assert not any(output["output_type"] == "error" for cell in cells for output in cell.get("outputs", ()))
    assert "/tmp/" not in text
    assert "/work/" not in text


def test_there_is_one_for_each_task() -> None:
    assert {path.stem for path in NOTEBOOKS} == {
        "reading_a_run",
        "train_from_python",
        "your_agent",
        "your_environment",
    }
