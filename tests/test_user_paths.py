"""`~` in arguments of command lines, of which no shell has made a folder, such as in `--output=~/runs`."""

import argparse
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollgym.clients.cli.main import client_parser
from rollgym.env_server.cli import server_parser, token_parser
from rollgym.env_server.common.settings_loading import check_settings
from rollgym.envs.games.sokoban.environment import SokobanEnv
from rollgym.envs.verifiers.judging.templates import templates_of
from rollgym.trainer.run.table import COMMANDS, parser_of
from rollgym.user_paths import expand_user, user_path


def test_home_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert (expand_user("~"), expand_user("~/a b"), expand_user("a/~")) == ("/home/me", "/home/me/a b", "a/~")
    assert expand_user("~root").startswith("/")
    for name in ("~nobody-here", "~nobody-here/a", "~" * 1_000_000):
        with pytest.raises(ValueError, match=r"is no home folder: write \./~"):
            expand_user(name)


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from _actions(each)
        yield action


def test_every_path_of_every_command_is_read_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    parsers = [client_parser(), server_parser(), token_parser(), *map(parser_of, COMMANDS)]
    actions = [action for parser in parsers for action in _actions(parser)]
    assert len([action for action in actions if action.type is user_path]) >= 15
    assert user_path("~/x") == Path("/home/me/x")
    assert not [action.dest for action in actions if action.type is Path]


def test_the_paths_of_a_servers_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert check_settings({"token_file": "~/tokens.yaml"}).token_file == Path("/home/me/tokens.yaml")


def test_files_that_environments_are_made_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "levels.txt").write_text("#####\n#@$.#\n#####\n")
    observation, _ = SokobanEnv(levels_file="~/levels.txt").reset(seed=0)
    assert "$" in observation
    with pytest.raises(ValueError, match=rf"there is no file or directory {tmp_path}/none"):
        SokobanEnv(levels_file="~/none")
    with pytest.raises(ValueError, match=f"templates_file cannot be read: .*{tmp_path}/none"):
        templates_of("~/none")
