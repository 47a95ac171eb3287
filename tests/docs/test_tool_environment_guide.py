"""The guide docs/guides/tool_environment.md: its environment is whole, passes the checks, and plays as it says."""

import importlib
import json
from pathlib import Path

import pytest

from rollgym.clients.checks.report import Status
from rollgym.clients.checks.target import CheckTarget
from rollgym.clients.checks.tools import check_tools
from rollgym.clients.process.local_server import LocalServer
from tests.support.processes import ROOT
from tests.support.snippets import fences_of
from tests.support.typed_commands import check_commands

PAGE = ROOT / "docs" / "guides" / "tool_environment.md"
ENVIRONMENT, CHECK, SERVE, PLAY = (
    each.text for each in fences_of(PAGE) if each.language in ("python", "bash")
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A reader's folder with the guide's file in it."""
    (tmp_path / "orders.py").write_text(ENVIRONMENT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def test_its_tools_answer_every_call(folder: Path) -> None:
    found = list(check_tools(CheckTarget("orders:Orders")))
    assert [each for each in found if each.status is not Status.PASS] == []
    broken = ENVIRONMENT.replace("except (sqlite3.Error, sqlite3.Warning, ValueError)", "except KeyError")
    (folder / "broken_orders.py").write_text(broken)
    failed = next(iter(check_tools(CheckTarget("broken_orders:Orders"))))
    shown = next(each.text for each in fences_of(PAGE) if each.language == "text")
    assert f"FAIL {failed.check}: {failed.detail}" == shown.splitlines()[0]
    line = next(n for n, text in enumerate(broken.splitlines(), 1) if "self.database.execute(sql)" in text)
    assert failed.remedy.startswith(f"raised at {folder}/broken_orders.py:{line} in query;")
    assert f"orders.py:{line} in query;" in shown


def test_its_task_can_be_solved_and_reads_only(folder: Path) -> None:
    def call(name: str, **arguments: object) -> str:
        return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"

    env = importlib.import_module("orders").Orders()
    task, _ = env.reset(seed=3)
    sql = "select id from orders where customer = '{}' order by euros desc, id desc limit 1"
    found = env.step(call("query", sql=sql.format(task.split()[0])))[0]
    ((number,),) = json.loads(found.removeprefix("<tool_response>").removesuffix("</tool_response>"))
    for harm in ("drop table orders", "select random()", "pragma query_only", "attach ':memory:' as other"):
        assert "error: " in env.step(call("query", sql=harm))[0]
    endless = "select count(*) from orders a, orders b, orders c, orders d"
    assert "interrupted" in env.step(call("query", sql=endless))[0]
    env.step(call("refund", order_id=number))
    _, reward, terminated, _, info = env.step("It is done.")
    assert (reward, terminated, info["success"]) == (1.0, True, True)


@pytest.mark.usefixtures("folder")
def test_its_commands_are_understood_and_its_client_plays(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_commands(CHECK + SERVE)
    with LocalServer(SERVE.split()[1:]) as server:
        exec(compile(PLAY.replace("http://127.0.0.1:8000", server.url), str(PAGE), "exec"), {})
    task, *_, result = [
        line for line in capsys.readouterr().out.splitlines() if line and not line.startswith("</")
    ]
    assert task.endswith("wants the most expensive order back (of several, the one with the largest id).")
    assert json.loads(result)[0][0] >= 100
