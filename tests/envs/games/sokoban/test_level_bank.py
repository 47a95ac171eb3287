"""Levels drawn from files as from the generator, here and from a server."""

import io
from collections import Counter
from pathlib import Path
from unittest import mock

import gymnasium
import numpy as np
import pytest

from rollgym.clients.cli.main import main as roll_env
from rollgym.clients.client.env import RemoteEnv
from rollgym.clients.protocol.errors import ProblemError
from rollgym.envs.games.sokoban.board import parse_level, solve
from rollgym.envs.games.sokoban.environment import SokobanEnv
from rollgym.envs.games.sokoban.generator import Difficulty, generate, split_of
from rollgym.envs.games.sokoban.levels import (
    FileLevel,
    LevelBank,
    LevelFileError,
    load_bank,
    read_levels,
)
from tests.support.level_files import format_levels
from tests.support.wire import Server

FIRST = "#####\n#@$.#\n#####"
SECOND = "######\n#. $@#\n#   ##\n######"


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory) -> Path:
    """Forty generated levels in two files, and what is no level file beside them."""
    place = tmp_path_factory.mktemp("levels")
    made = [generate(np.random.default_rng(seed), Difficulty(6, 6, 1, 1, None), None) for seed in range(40)]
    levels = [FileLevel(number, f"n{number}", each.level.to_xsb()) for number, each in enumerate(made, 1)]
    (place / "more").mkdir()
    (place / "a.txt").write_text(format_levels(levels[:30]))
    (place / "more" / "b.XSB").write_text(format_levels(levels[30:], run_length=True))
    (place / "README.md").write_text("Levels of ours.")
    return place


def test_a_directory_is_all_its_files(data_dir):
    bank = load_bank(str(data_dir))
    assert len(bank) == 40
    assert (bank[0].file, bank[29].file, bank[30].file, bank[39].file) == (
        "a.txt",
        "a.txt",
        "more/b.XSB",
        "more/b.XSB",
    )
    assert [bank[index].entry.title for index in (0, 29, 30, 39)] == ["n1", "n30", "n31", "n40"]
    assert [bank[index].entry.number for index in (29, 30)] == [30, 1]
    with pytest.raises(IndexError, match="has 40 levels"):
        bank[40]
    assert load_bank(str(data_dir)) is bank, "a process reads levels once"


def test_levels_are_drawn_by_seed_and_split(data_dir):
    every = {each.text for file in ("a.txt", "more/b.XSB") for each in read_levels(data_dir / file)}
    for split in ("train", "valid", "test", None):
        environment, again = (SokobanEnv(data_dir=str(data_dir), split=split) for _ in range(2))
        seen = set()
        for seed in range(200):
            board, info = environment.reset(seed=seed)
            assert again.reset(seed=seed)[0] == board == info["state"]["level"]
            assert split is None or split_of(parse_level(board)) == split
            seen.add(board)
        assert seen == {text for text in every if split is None or split_of(parse_level(text)) == split}


def test_each_level_is_as_likely(data_dir):
    bank, generator = load_bank(str(data_dir)), np.random.default_rng(0)
    counts = Counter(bank.draw(generator, None).entry.title for _ in range(4_000))
    assert len(counts) == 40
    assert max(counts.values()) < 150
    assert min(counts.values()) > 60


def test_info_says_which_level_it_is(data_dir):
    environment = SokobanEnv(data_dir=str(data_dir))
    _, info = environment.reset(seed=0, options={"level_index": 31})
    assert info["level_source"] == {"file": "more/b.XSB", "number": 2, "title": "n32"}
    assert environment.step("Up")[4]["level_source"]["number"] == 2
    assert info["optimal_steps"] == len(solve(parse_level(info["state"]["level"])))
    for index in (-1, 40, "1", 1.0, True):
        with pytest.raises(ValueError, match="level_index must be a whole number from 0 to 39"):
            environment.reset(seed=0, options={"level_index": index})


def test_a_given_level_wins(data_dir):
    environment = SokobanEnv(data_dir=str(data_dir), level=FIRST)
    _, info = environment.reset(seed=0)
    assert info["state"]["level"] == FIRST
    assert "level_source" not in info
    assert environment.reset(seed=0, options={"level": SECOND})[1]["state"]["level"] == SECOND
    assert SokobanEnv(data_dir=str(data_dir)).reset(seed=0, options={"level": SECOND})[0] == SECOND


def test_an_expert_solves_what_is_drawn(data_dir):
    environment = SokobanEnv(data_dir=str(data_dir), split=None)
    for seed in range(5):
        _, info = environment.reset(seed=seed, options={"expert": True})
        for _ in range(info["optimal_steps"]):
            *_, terminated, _, info = environment.step(info["expert_action"])
        assert terminated
        assert info["success"]


def test_hard_levels_begin_at_once_without_an_optimum(tmp_path):
    rows = ["#" * 16, *("#" + " " * 14 + "#" for _ in range(12)), "#" * 16]
    grid = [list(row) for row in rows]
    for place in range(5):
        grid[2][2 + 2 * place] = "$"
        grid[11][3 + 2 * place] = "."
    grid[6][8] = "@"
    (tmp_path / "hard.xsb").write_text("\n".join("".join(row) for row in grid))
    environment = SokobanEnv(levels_file=str(tmp_path / "hard.xsb"), split=None)
    assert environment.reset(seed=0)[1]["optimal_steps"] is None


def test_a_split_that_is_empty_says_so_and_a_rare_one_is_found():
    train = next(
        made.level.to_xsb()
        for made in (
            generate(np.random.default_rng(seed), Difficulty(6, 6, 1, 1, None), "train") for seed in range(1)
        )
    )
    rare = generate(np.random.default_rng(0), Difficulty(6, 6, 1, 1, None), "valid").level.to_xsb()
    levels = [FileLevel(number, None, train) for number in range(1, 2_001)]
    bank = LevelBank({"f": [*levels, FileLevel(2_001, "rare", rare)]}, "f")
    assert bank.draw(np.random.default_rng(0), "valid").entry.title == "rare"
    with pytest.raises(
        LevelFileError, match=r"none of the 2001 levels of f is of split 'test'.*ask for split null"
    ):
        bank.draw(np.random.default_rng(0), "test")


def test_a_file_and_a_directory_exclude_each_other(data_dir):
    with pytest.raises(ValueError, match="exclude each other"):
        SokobanEnv(levels_file=str(data_dir / "a.txt"), data_dir=str(data_dir))


def test_gymnasium_makes_it(data_dir):
    made = gymnasium.make("rollgym:rollgym/Sokoban-v0", levels_file=str(data_dir / "a.txt"))
    assert made.reset(seed=0)[1]["level_source"]["file"] == "a.txt"


# -- served ------------------------------------------------------------------------------------------------------------


def operator(data_dir: Path) -> tuple[str, str]:
    return "--operator-kwargs", f'Sokoban-v0={{"data_dir": "{data_dir}"}}'


def test_a_server_draws_the_levels_that_a_process_here_draws(data_dir):
    with Server(*operator(data_dir)) as server:
        for split in ("train", "valid", "test", None):
            remote, local = (
                RemoteEnv(server.url, "Sokoban-v0", {"split": split}),
                SokobanEnv(data_dir=str(data_dir), split=split),
            )
            for seed in range(5):
                board, info = remote.reset(seed=seed)
                expected, here = local.reset(seed=seed)
                assert board == expected
                assert info["level_source"] == here["level_source"]
                assert remote.step("Left")[:4] == local.step("Left")[:4]
            board, info = remote.reset(seed=0, options={"level_index": 30})
            assert info["level_source"] == {"file": "more/b.XSB", "number": 1, "title": "n31"}
            remote.close()
        for kwargs in ({"levels_file": "/etc/passwd"}, {"data_dir": "/"}):
            with pytest.raises(ProblemError, match="set by the operator"):
                RemoteEnv(server.url, "Sokoban-v0", kwargs)


def test_a_server_with_a_bad_file_does_not_start(tmp_path):
    (tmp_path / "bad.xsb").write_text("#####\n# $.#\n#####")
    with pytest.raises(AssertionError, match=r"level 1 at line 1 of .*bad\.xsb has no player"):
        Server(*operator(tmp_path))


def test_roll_env_check_passes(data_dir):
    with mock.patch("sys.stdout", io.StringIO()) as printed:
        code = roll_env(["check", "Sokoban-v0", "--kwarg", f"data_dir={data_dir}"])
    assert code == 0, printed.getvalue()
    assert "equal to local play" in printed.getvalue()
