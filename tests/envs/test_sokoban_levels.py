"""Level files: every format, what is wrong told with the remedy, and drawing from them as from the generator."""

import io
from collections import Counter
from pathlib import Path
from unittest import mock

import gymnasium
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clients.commands.main import main as roll_env
from clients.env import RemoteEnv
from clients.protocol.errors import ProblemError
from envs.sokoban.bank import LevelBank, load_bank
from envs.sokoban.board import is_enclosed, parse_level
from envs.sokoban.environment import SokobanEnv
from envs.sokoban.generator import Difficulty, generate, split_of
from envs.sokoban.levels import (
    FileLevel,
    LevelFileError,
    format_levels,
    parse_levels,
    read_levels,
    run_lengths,
)
from envs.sokoban.solver import solve
from tests.support.wire import Server

FIRST = "#####\n#@$.#\n#####"
SECOND = "######\n#. $@#\n#   ##\n######"

BOXOBAN = """; 0
##########
##########
###  #####
### $ ####
###  .####
### @ ####
##########
##########
##########
##########

; 1
##########
#   ######
# $ ######
# @ .#####
##########
##########
##########
##########
##########
##########
"""

COLLECTION = f"""Set: Two of ours
Author: Nobody
Comment:
#####
#@$.# is a drawing inside a comment
#####
Comment-End:

The corridor
{FIRST}

-----------

::: nothing to see here :::
   ####
####  #
#@ $ .#
#######
Title: Behind the bend
Author: Nobody
"""


def texts(levels):
    return [level.text for level in levels]


def titles(levels):
    return [level.title for level in levels]


# -- formats -----------------------------------------------------------------------------------------------------------


def test_boxoban():
    levels = parse_levels(BOXOBAN)
    assert titles(levels) == ["0", "1"]
    assert [level.number for level in levels] == [1, 2]
    assert all(text.count("\n") == 9 and len(text) == 109 for text in texts(levels))
    assert len(solve(parse_level(levels[1].text))) > 0


def test_a_collection_with_titles_and_comments():
    levels = parse_levels(COLLECTION)
    assert titles(levels) == ["The corridor", "Behind the bend"]
    assert texts(levels) == [FIRST, "#######\n####  #\n#@ $ .#\n#######"]


def test_a_title_may_stand_above():
    levels = parse_levels(f"Title: One\n{FIRST}\n\nTitle: Two\n{SECOND}\n")
    assert titles(levels) == ["One", "Two"]


@pytest.mark.parametrize(
    "written",
    [
        "5#|#@$.#|5#",
        "5#\n#@$.#\n5#",
        "5#|#@$.#|\n5#",
        "5#|#@$.#|5#|",
        "(5#|)#@$.#|5#",
        "5#|#@$.#|(2(2#)#)",
        "  #####\n  #@$.#\n  #####  ",
        "-#####-\n-#@$.#-\n-#####-",
        "_#####\n_#@$.#\n_#####\n______",
        "#####\r\n#@$.#\r\n#####\r\n",
        "#####\n#PXO#\n#####",
        "'a title'\n#####\n#@$.#\n#####\n",
    ],
)
def test_one_level_in_many_hands(written):
    assert texts(parse_levels(written)) == [FIRST]


def test_lines_of_runs_are_a_level_each():
    levels = parse_levels(f"{run_lengths(FIRST)}\n{run_lengths(SECOND)}\n; named\n{run_lengths(FIRST)}\n")
    assert texts(levels) == [FIRST, SECOND, FIRST]
    assert titles(levels) == [None, None, "named"]
    assert run_lengths(SECOND) == "6#|#.-$@#|#3-2#|6#"


def test_the_symbols_of_ragen():
    assert texts(parse_levels("######\n#PXO_#\n#_√__#\n######\n\n######\n#_SX_#\n######")) == [
        "######\n#@$. #\n# *  #\n######",
        "######\n# +$ #\n######",
    ]


def test_boards_need_no_corners():
    (level,) = parse_levels(" ###\n#@$.#\n ###")
    assert level.text == "#####\n#@$.#\n#####"


@pytest.mark.parametrize(("encoding", "name"), [("utf-8-sig", "Zoë"), ("latin-1", "Zoë")])
def test_encodings(tmp_path, encoding, name):
    file = tmp_path / "levels.sok"
    file.write_bytes(f"; {name}\n{FIRST}\n".encode(encoding))
    assert titles(read_levels(file)) == [name]


@settings(max_examples=60, deadline=None)
@given(
    drawn=st.lists(
        st.tuples(
            st.integers(0, 10**6),
            st.none() | st.text("abcXYZ 0189ßü.,#$", max_size=12).map(str.strip).filter(str.isalnum),
        ),
        min_size=1,
        max_size=4,
    ),
    run_length=st.booleans(),
)
def test_what_is_written_is_read_again(drawn, run_length):
    levels = []
    for number, (seed, title) in enumerate(drawn, 1):
        made = generate(np.random.default_rng(seed), Difficulty(6, 7, 1 + seed % 2, 1, None), None)
        levels.append(FileLevel(number, title, made.level.to_xsb()))
    assert parse_levels(format_levels(levels, run_length=run_length)) == levels


@settings(max_examples=200, deadline=None)
@given(text=st.text("#@$.*+ -_|()0123;\n\tab:'", max_size=80))
def test_any_text_is_read_or_refused_with_a_reason(text):
    try:
        levels = parse_levels(text, "file")
    except LevelFileError:
        return
    for level in levels:
        assert parse_level(level.text).to_xsb() == level.text
        assert is_enclosed(level.text.split("\n"))


@settings(max_examples=200, deadline=None)
@given(rows=st.lists(st.text("#### .$@*+", min_size=1, max_size=6), min_size=1, max_size=5))
def test_nothing_can_leave_a_board(rows):
    try:
        level = parse_level("\n".join(rows))
    except ValueError:
        return
    room, seen, frontier = level.room, {level.player}, [level.player]
    while frontier:
        cell = frontier.pop()
        row, column = divmod(cell, room.width)
        assert 0 < row < room.height - 1
        assert 0 < column < room.width - 1
        for step in room.steps:
            if cell + step not in room.walls | seen:
                seen.add(cell + step)
                frontier.append(cell + step)


# -- mistakes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("board", "message"),
    [
        ("#####\n# $.#\n#####", "has no player: mark its cell with @"),
        ("######\n#@@$.#\n######", "has 2 players: leave one"),
        ("#####\n#@$ #\n#####", r"has 1 boxes .* and 0 targets .* make them as many"),
        ("#####\n#@  #\n#####", "has no box: draw one"),
        ("#####\n#@* #\n#####", "has no box to push: remove it"),
        ("#####\n#@$.#\n## ##", "walls that do not close"),
        ("#####\n#@$. \n#####", "walls that do not close"),
        ("######\n#@$x.#\n######", r"has 'x' on its board: boards are drawn with '#@\+\$\*\. ' only"),
        ("#####\n#@$.#\n\t####", r"has '\\t' on its board"),
        ("######\n#@  $#\n#.   #\n######", "row 2, column 5 never gets to a target"),
        ("(5#|#@$.#|5#", "parentheses that do not close"),
        ("9999#|9999#|9999#", "runs of more than"),
        ("9(9(9(9(9(9(#))))))", "runs of more than"),
        ("101#|#@$.96-#|101#", "has 3 rows and 101 columns"),
    ],
)
def test_a_bad_level_is_named_with_the_remedy(tmp_path, board, message):
    file = tmp_path / "mine.xsb"
    file.write_text(f"; good\n{FIRST}\n\n; bad\n{board}\n")
    with pytest.raises(LevelFileError, match=message) as refused:
        read_levels(file)
    assert str(refused.value).startswith(f"level 2 'bad' at line 7 of {file} ")


def test_several_mistakes_are_told_at_once():
    with pytest.raises(LevelFileError) as refused:
        parse_levels("\n\n".join(["#####\n# $.#\n#####"] * 8), "f")
    lines = str(refused.value).split("\n")
    assert lines[0].startswith("level 1 at line 1 of f has no player")
    assert lines[4].startswith("level 5 at line 17 of f ")
    assert lines[5] == "and 3 more"


def test_files_without_levels(tmp_path):
    with pytest.raises(LevelFileError, match="holds no level: a board is"):
        parse_levels("Nothing here.\n")
    with pytest.raises(LevelFileError, match="comment at line 1 of f does not end"):
        parse_levels(f"Comment:\n{FIRST}", "f")
    with pytest.raises(LevelFileError, match="there is no file or directory"):
        load_bank(str(tmp_path / "none.xsb"))
    with pytest.raises(LevelFileError, match=r"no level file in .* \.sok, \.txt, \.xsb"):
        load_bank(str(tmp_path))


def test_a_file_that_cannot_be_read_says_so(tmp_path):
    with pytest.raises(LevelFileError, match="cannot read"):
        read_levels(tmp_path / "none.xsb")


# -- drawing -----------------------------------------------------------------------------------------------------------


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
    for index in (-1, 40, "1", 1.0):
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
