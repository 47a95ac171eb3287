"""Every mistake of docs/mistakes.md is answered as the page says: in one short line, with exit code 2."""

import re
import shlex
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from rollgym.clients.cli.main import main as roll_env
from rollgym.env_server.cli import main as roll_serve
from rollgym.trainer.cli import main as roll_train
from rollgym.trainer.run.agent_proxy import main as roll_agent_proxy
from tests.support.processes import ROOT

PAGE = (ROOT / "docs" / "mistakes.md").read_text(encoding="utf-8")
MISTAKES = re.findall(r"^\$ (.+)\n(.+)$", PAGE, re.MULTILINE)
PROGRAMS: dict[str, Callable[[Sequence[str]], int]] = {
    "roll-agent-proxy": roll_agent_proxy,
    "roll-env": roll_env,
    "roll-serve": roll_serve,
    "roll-train": roll_train,
}
WIDTH, MOST_LINES = 80, 3
FILES = {
    "my_reward.py": "def sooner(trajectory):\n    return [0.0 for _ in trajectory.turns]\n\n\nimport_me = 3\n",
    "needs_foo.py": "import foo\n",
    "hangman.py": "import gymnasium\n\n\nclass Hangman(gymnasium.Env):\n    pass\n",
    "bad.yaml": "tasks: [\n",
    "list.yaml": "- a\n",
    "item.json": "[1]",
    "p.rb": "puts 1\n",
    "p.py": "print(1)\n",
}


@pytest.fixture(scope="module", autouse=True)
def here(tmp_path_factory: pytest.TempPathFactory):
    folder: Path = tmp_path_factory.mktemp("mistakes")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", list(sys.path))
        for name in ("ROLLGYM_TOKEN", "ROLLGYM_PROXY_TOKEN"):
            patch.delenv(name, raising=False)
        patch.setenv("COLUMNS", str(WIDTH))
        yield folder
    for name in ("my_reward", "needs_foo", "hangman"):
        sys.modules.pop(name, None)


def test_the_page_has_sixty_mistakes_of_all_four_commands() -> None:
    assert len(MISTAKES) >= 60
    assert {shlex.split(typed)[0] for typed, _ in MISTAKES} == PROGRAMS.keys()


@pytest.mark.parametrize(("typed", "answer"), MISTAKES, ids=[typed for typed, _ in MISTAKES])
def test_a_mistake_is_answered_in_one_short_line(
    typed: str, answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    program, *words = shlex.split(typed)
    try:
        code = PROGRAMS[program](words)
    except SystemExit as end:
        code = end.code  # type: ignore[assignment]
    said = capsys.readouterr().err
    assert re.fullmatch(".*".join(map(re.escape, answer.split("..."))), said.removesuffix("\n")), said
    assert code == 2
    assert len(textwrap.wrap(said, WIDTH)) <= MOST_LINES
