"""`roll-env audit`, as a user runs it."""

import re
from pathlib import Path
from typing import Any

import orjson
import pytest

from rollgym.clients.cli.main import main
from tests.support.client_server import ServerProcess
from tests.support.foreign_sockets import Careless

pytestmark = pytest.mark.usefixtures("forked_servers")

FAULTY = "tests.support.planted.environments:SolvedBeforeItBegins"
QUICK = ("--episodes", "10")


def test_the_exit_code_follows_the_verdicts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", FAULTY, *QUICK]) == 1
    # Long lines are broken where the terminal ends.
    printed = " ".join(capsys.readouterr().out.split())
    assert re.search(r"✗ +nothing is solved at the reset +reset with seed", printed)
    assert "→ `success` is false until the task is solved" in printed
    assert "1 failed" in printed


def test_a_running_server_is_audited_without_what_needs_a_fresh_process(
    server: ServerProcess, tmp_path: Any
) -> None:
    path = tmp_path / "card.json"
    assert main(["audit", "FrozenLake-v0", "--url", server.url, "--episodes", "40", "--json", str(path)]) == 0
    card = orjson.loads(path.read_bytes())
    entries = {entry["check"]: entry for entry in card["entries"]}
    assert entries["in another process"]["verdict"] == "skipped"
    assert "audit without --url" in entries["in another process"]["detail"]
    assert "roll-serve --allow-expert" in entries["expert"]["detail"]
    assert entries["memory"]["verdict"] == "ok"
    assert card["counts"]["failed"] == 0
    assert card["about"]["episodes"] == 40


def test_a_server_that_takes_steps_after_the_end_is_found(tmp_path: Any) -> None:
    path = tmp_path / "card.json"
    with Careless() as careless:
        assert main(["audit", "Careless-v0", "--url", careless.url, *QUICK, "--json", str(path)]) == 1
    entries = {entry["check"]: entry for entry in orjson.loads(path.read_bytes())["entries"]}
    found = entries["no step after the end"]
    assert found["verdict"] == "failed"
    assert found["detail"] == "a step after the end is taken, and pays 7"
    assert entries["finite"]["verdict"] == "failed"
    assert "pays nan" in entries["finite"]["detail"]


def test_what_the_budget_does_not_allow_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "FrozenLake-v0", "--budget-s", "0.5"]) == 0
    printed = capsys.readouterr().out
    assert "the budget of 0.5 s was spent before" in printed
    assert "not checked" in printed


def test_tasks_may_come_from_a_file(tmp_path: Path) -> None:
    items, card = tmp_path / "items.jsonl", tmp_path / "card.json"
    items.write_text("".join(f'{{"question": "{n} + 1", "answer": "{n + 1}"}}\n' for n in range(20, 50)))
    command = ["audit", "Arithmetic-v0", *QUICK, "--items", str(items), "--json", str(card)]
    assert main(command) == 0
    found = orjson.loads(card.read_bytes())
    assert found["counts"]["warning"] == found["counts"]["failed"] == 0
    entries = {entry["check"]: entry for entry in found["entries"]}
    assert entries["reference answer"]["numbers"] == {"paid": 30, "items": 30, "field": "answer"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["FrozenLake-v0", "--episodes", "0"], "must be positive"),
        (["FrozenLake-v0", "--kwargs", "[1]"], "--kwargs must be a JSON object"),
        (["FrozenLake-v0", "--kwargs", "{"], "--kwargs"),
        (["Arithmetic-v0", "--items", "no_such_file.jsonl"], "no_such_file.jsonl"),
        (["no_such_module:Env"], "no module"),
        (["a:B", "--url", "http://127.0.0.1:1"], "name an id of its catalog"),
    ],
)
def test_mistakes_are_told_in_a_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_an_unknown_environment_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "FrozenLak-v0"]) == 2
    assert "did you mean FrozenLake-v0" in capsys.readouterr().err
