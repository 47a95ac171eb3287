"""Short runs of the soaks: three gateways, four nodes, a shared journal, requests spread at random, and kills."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.redis_server import program

ROOT = Path(__file__).parents[3]


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
def test_a_journal_that_fails_over_makes_no_answer_another_one(tmp_path: Path) -> None:
    program()
    out = tmp_path / "soak.json"
    options = {
        "--minutes": "0.4",
        "--kills": "3",
        "--failovers": "1",
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
