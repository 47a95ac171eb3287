"""What docs/environments/reference/*.md tell to type is typed, with one server for all in place of one for each."""

import io
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollgym.clients.cli.main import main
from rollgym.envs.pages import FOLDER
from rollgym.envs.registry import builtin_environments
from tests.support.client_server import ServerProcess
from tests.support.judge_double import JudgeDouble
from tests.support.processes import ROOT
from tests.support.sandboxes import working_sandbox
from tests.support.snippets import SHELLS, fences_of
from tests.support.typed_commands import statements_of

GUIDES = ("games.md", "instruction_following.md", "webshop.md")
OFTEN = frozenset({"FrozenLake-v0", "Arithmetic-v0"})
ENVIRONMENTS = builtin_environments()
PAGES = [
    pytest.param(page, id=page.stem, marks=() if page.stem in OFTEN else pytest.mark.slow)
    for page in (
        *(ROOT / FOLDER / f"{name}.md" for name in ENVIRONMENTS),
        *(ROOT / "docs" / "environments" / name for name in GUIDES),
    )
]
# What is typed into a game, and how little an audit may take: tests/clients/audit has them at their length.
LINES = "<answer>1</answer>\n:info\n"
FLAGS = ["--allow-expert"]
SHORT = ("--episodes", "2", "--budget-s", "0.5")


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with JudgeDouble() as judge:
        kwargs = f'Judge-v0={{"url": "{judge.url}", "model": "big-judge"}}'
        with ServerProcess([*FLAGS, "--operator-kwargs", kwargs]) as running:
            yield running


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page(
    page: Path, server: ServerProcess, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if page.stem in ENVIRONMENTS and ENVIRONMENTS[page.stem].load().metadata.get("needs") == "a sandbox":
        working_sandbox()
    blocks = [each.text for each in fences_of(page) if each.run_by]
    typed = [shlex.split(line, comments=True) for text in blocks for line in statements_of(text)]
    assert typed
    for program, *words in typed:
        if program == "roll-serve":
            assert words == FLAGS
            continue
        monkeypatch.setattr("sys.stdin", io.StringIO(LINES))
        more = SHORT if words[0] == "audit" else ()
        assert program == "roll-env"
        code = main([*words, "--url", server.url, *more])
        said = capsys.readouterr()
        assert code == 0, (words, said)
        assert "reward" in said.out


def test_a_page_of_an_environment_plays_shows_and_audits_it() -> None:
    for name in ENVIRONMENTS:
        (fence,) = [each for each in fences_of(ROOT / FOLDER / f"{name}.md") if each.language in SHELLS]
        expected = [f"roll-env {command} {name}" for command in ("play", "show", "audit")]
        assert statements_of(fence.text) == expected
