"""What a person sees who follows the README in a terminal of 80 columns."""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollgym.clients.cli.main import main as client_main
from rollgym.clients.process.terminal import wrapped
from rollgym.env_server.cli import main as server_main
from rollgym.trainer.run.table import COMMANDS, parser_of
from rollgym.version import __version__
from tests.support.client_server import ServerProcess
from tests.support.processes import ROOT
from tests.support.roll_env import Done, roll_env

pytestmark = pytest.mark.usefixtures("forked_servers")

QUIET = ("--log-level", "error")


def run(*arguments: str, stdin: str = "", **environment: str) -> Done:
    """Run `roll-env` in this process, in a terminal of 80 columns."""
    with mock.patch.dict(os.environ, {"COLUMNS": "80"} | environment):
        return roll_env(*arguments, stdin=stdin)


@pytest.mark.parametrize("module", ["rollgym.clients.cli.main", "rollgym.env_server", "rollgym.trainer.cli"])
def test_every_command_says_which_version_it_is_of(module: str) -> None:
    command = [sys.executable, "-m", module, "--version"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, f"rollgym {__version__}\n"), done.stderr


def test_so_does_each_of_its_words(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        *("list", "show", "play", "replay", "verify", "check", "audit", "bench", "doctor"),
        *("register", "unregister", "probe", "sandbox"),
    ]
    asked: list[Callable[[], object]] = [partial(client_main, [word, "--version"]) for word in words]
    asked.append(partial(server_main, ["token", "--version"]))
    asked += [partial(parser_of(command).parse_args, ["--version"]) for command in COMMANDS]
    for ask in asked:
        with pytest.raises(SystemExit) as end:
            ask()
        told = end.value.code, capsys.readouterr().out
        assert told == (0, f"rollgym {__version__}\n"), ask


@pytest.mark.parametrize("number", ["nan", "inf", "soon"])
@pytest.mark.parametrize(
    "words",
    [
        ["bench", "FrozenLake-v0", "--seconds"],
        ["audit", "FrozenLake-v0", "--budget-s"],
        ["register", "Guess", "http://127.0.0.1:1", "--gateway", "http://127.0.0.1:1", "--weight"],
        ["register", "Guess", "http://127.0.0.1:1", "--gateway", "http://127.0.0.1:1", "--ttl-s"],
    ],
)
def test_what_is_no_number_is_told_before_anything_is_done(
    words: list[str], number: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        client_main([*words, number])
    assert f"argument {words[-1]}: a number is needed, not '{number}'" in capsys.readouterr().err


def test_an_empty_fleet_is_told_from_an_empty_server() -> None:
    with ServerProcess(("--gateway", "--allow-network", "loopback", *QUIET)) as gateway:
        done = run("list", "--url", gateway.url)
        assert done.returncode == 0, done.stderr
        assert "no environments yet" in done.stdout
        assert f"--register {gateway.url}\n" in done.stdout
        assert "starting" in done.stdout
        assert run("list", "--url", gateway.url, "--json").stdout == "[]\n"
    with ServerProcess(("--no-builtin", *QUIET)) as server:
        assert "no environments yet" not in run("list", "--url", server.url).stdout


def test_who_has_no_token_is_told_where_it_goes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokens = tmp_path / "tokens.yaml"
    assert server_main(["token", "--file", str(tokens), "--name", "me", "--role", "play"]) == 0
    token = capsys.readouterr().out.strip().splitlines()[-1]
    with ServerProcess(("--token-file", str(tokens), "--no-builtin", *QUIET)) as server:
        for given in ({}, {"ROLLGYM_TOKEN": "wrong"}):
            done = run("list", "--url", server.url, **given)
            assert done.returncode == 2
            assert "--token" in done.stderr
            assert "ROLLGYM_TOKEN" in done.stderr
            assert done.stderr.count("\n") == 1
        done = run("list", "--url", server.url, ROLLGYM_TOKEN=token)
        assert done.returncode == 0, done.stderr


def test_an_episode_by_hand_stays_within_the_terminal(server: ServerProcess) -> None:
    done = run("play", "FrozenLake-v0", "--seed", "1", stdin="Right\n:quit\n")
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert done.stdout.startswith("Type an action")


@given(st.text(alphabet=st.sampled_from("ab \n\t-"), max_size=300), st.integers(20, 100))
def test_words_are_wrapped_and_none_is_lost(text: str, width: int) -> None:
    lines = wrapped(text, width)
    assert lines.split() == text.split()
    for line in lines.split("\n"):
        assert len(line.expandtabs()) <= width or len(line.split()) <= 1 or line in text.split("\n")


@pytest.mark.parametrize(
    "text", ["", "#####\n#  @#\n#####", "a" * 200, "   indented and short", "one\n\n\nfour"]
)
def test_what_needs_no_wrapping_stays_as_it_is(text: str) -> None:
    assert wrapped(text, 80) == text


def test_the_width_is_the_terminals() -> None:
    with mock.patch.dict(os.environ, {"COLUMNS": "40", "LINES": "10"}):
        assert [len(line) for line in wrapped("word " * 20).split("\n")] == [39, 39, 19]
