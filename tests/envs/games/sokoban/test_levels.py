"""Level files: every format, and what is wrong told with the remedy."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollgym.envs.games.sokoban.board import is_enclosed, parse_level, solve
from rollgym.envs.games.sokoban.generator import Difficulty, generate
from rollgym.envs.games.sokoban.levels import (
    FileLevel,
    LevelFileError,
    load_bank,
    parse_levels,
    read_levels,
)
from tests.support.level_files import format_levels, run_lengths

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


@settings(max_examples=60)
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


@settings(max_examples=200)
@given(text=st.text("#@$.*+ -_|()0123;\n\tab:'", max_size=80))
def test_any_text_is_read_or_refused_with_a_reason(text):
    try:
        levels = parse_levels(text, "file")
    except LevelFileError:
        return
    for level in levels:
        assert parse_level(level.text).to_xsb() == level.text
        assert is_enclosed(level.text.split("\n"))


@settings(max_examples=200)
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
