"""Short runs of the soaks: gateways, nodes and a shared journal under kills, and a few of the damaged journals."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.redis_server import program

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_few_kills_of_gateways_and_nodes_lose_no_step(tmp_path: Path) -> None:
    program()
    out = tmp_path / "soak.json"
    command = [
        sys.executable,
        "benchmarks/soak/gateways.py",
        "--minutes",
        "0.25",
        "--kills",
        "4",
        "--seed",
        "3",
    ]
    command += [
        "--journal-kills",
        "1",
        "--players",
        "8",
        "--pause",
        "0.15",
        "--settle-s",
        "0",
        "--out",
        str(out),
    ]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    result = json.loads(out.read_text())["result"]
    assert set(result["kills"]) == {"gateway", "node", "journal"}
    assert result["episodes"] >= 8


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [pytest.param("0", marks=pytest.mark.exhaustive), "1"])
def test_a_journal_that_fails_over_makes_no_answer_another_one(tmp_path: Path, replicas: str) -> None:
    program()
    out = tmp_path / "soak.json"
    options = {
        "--minutes": "0.4",
        "--kills": "3",
        "--failovers": "1",
        "--replicas": replicas,
        "--players": "8",
        "--pause": "0.2",
        "--largest": "1000000",
        "--settle-s": "0",
        "--out": str(out),
    }
    command = [
        sys.executable,
        "benchmarks/soak/failover.py",
        *(part for each in options.items() for part in each),
    ]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    result = json.loads(out.read_text())["result"]
    assert result["kills"]["fail-over"] == 1
    assert result["steps"] >= 100


@pytest.mark.parametrize("half", ["own", "shared"])
def test_nobody_goes_back_in_silence_where_journals_are_damaged(tmp_path: Path, half: str) -> None:
    if half == "shared":
        program()
    out = tmp_path / "journals.json"
    command = [
        *(sys.executable, "benchmarks/soak/damaged_journals.py", "--halves", half),
        *("--journals", "8" if half == "own" else "4", "--seed", "7", "--out", str(out)),
    ]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    result = json.loads(out.read_text())["result"][half]
    assert result["behind_in_silence"] == []
    assert result["sessions"] == 5 * result["journals"]
    # It goes on where it was.
    before = out.read_text()
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=400)
    assert json.loads(out.read_text())["journals"] == json.loads(before)["journals"]
