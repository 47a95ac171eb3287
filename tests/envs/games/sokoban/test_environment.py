"""Sokoban-v0: gym-sokoban's rules and rewards, exact difficulties, splits that hold."""

from collections import deque

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from hypothesis import given, settings
from hypothesis import strategies as st

from rollgym.envs.games.sokoban.board import Level, parse_level, push_distances, solve
from rollgym.envs.games.sokoban.environment import VOCABULARIES, SokobanEnv
from rollgym.envs.games.sokoban.generator import EXAMPLES, Difficulty, canonical_text, generate, split_of

CORRIDOR = "#######\n#@ $ .#\n#######"


def play(level: str, *actions: str, **kwargs):
    environment = SokobanEnv(level=level, **kwargs)
    environment.reset(seed=0)
    return [environment.step(action) for action in actions]


def test_walk_push_and_solve_pay_as_gym_sokoban():
    results = play(CORRIDOR, "Left", "Right", "Right", "Right")
    assert [round(result[1], 6) for result in results] == [-0.1, -0.1, -0.1, 10.9]
    assert [result[2] for result in results] == [False, False, False, True]
    assert [result[4]["state"]["level"].split("\n")[1] for result in results] == [
        "#@ $ .#",
        "# @$ .#",
        "#  @$.#",
        "#   @*#",
    ]
    assert results[-1][4]["success"]


def test_boxes_on_and_off_targets_pay_once_each():
    level = "########\n#@$.  .#\n#   $  #\n########"
    rewards = [round(result[1], 6) for result in play(level, "Right", "Right", "Left")]
    assert rewards == [0.9, -1.1, -0.1]


def test_a_box_that_starts_on_a_target_pays_at_the_first_step():
    level = "#######\n#@ * ##\n#  $ .#\n#######"
    rewards = [round(result[1], 6) for result in play(level, "Left", "Left")]
    assert rewards == [0.9, -0.1]


def test_two_boxes_in_a_row_do_not_move():
    level = "########\n#@$$ ..#\n########"
    (result,) = play(level, "Right")
    assert (result[4]["state"]["level"], round(result[1], 6)) == (parse_level(level).to_xsb(), -0.1)


@pytest.mark.parametrize("level", [True, 5, ["#@$.#"], {"rows": []}])
def test_a_level_that_is_no_text_is_refused(level):
    with pytest.raises(ValueError, match="a level is text"):
        SokobanEnv().reset(options={"level": level})


def test_a_level_by_its_number_needs_a_file_of_levels():
    with pytest.raises(ValueError, match="levels_file"):
        SokobanEnv().reset(options={"level_index": 3})


def test_the_limit_truncates_and_solving_on_it_terminates():
    assert play(CORRIDOR, "Left", "Left", max_episode_steps=2)[1][2:4] == (False, True)
    assert play(CORRIDOR, "Right", "Right", "Right", max_episode_steps=3)[2][2:4] == (True, False)


def breadth_first(level: Level) -> int | None:
    """Fewest moves by brute force over the rules themselves."""
    frontier, seen = deque([(level, 0)]), {(level.boxes, level.player)}
    while frontier:
        current, moves = frontier.popleft()
        if current.solved:
            return moves
        for action in range(4):
            reached = current.moved(action)
            if (key := (reached.boxes, reached.player)) not in seen:
                seen.add(key)
                frontier.append((reached, moves + 1))
    return None


@settings(max_examples=40)
@given(seed=st.integers(0, 10**6), boxes=st.integers(1, 2))
def test_generated_difficulty_is_exact_and_the_solver_optimal(seed, boxes):
    made = generate(np.random.default_rng(seed), Difficulty(6, 6, boxes, 1, None), None)
    plan = solve(made.level)
    assert len(plan) == made.optimal_moves == breadth_first(made.level)
    level = made.level
    for action in plan:
        level = level.moved(action)
    assert level.solved


@settings(max_examples=40)
@given(rows=st.lists(st.text("# .$", min_size=4, max_size=4), min_size=3, max_size=4))
def test_any_small_level_is_solved_or_proved_unsolvable(rows):
    cells = "".join(rows)
    if cells.count("$") != cells.count(".") or not 1 <= cells.count("$") <= 2 or " " not in cells:
        return
    place = cells.index(" ")
    cells = cells[:place] + "@" + cells[place + 1 :]
    level = parse_level("\n".join(cells[start : start + 4] for start in range(0, len(cells), 4)))
    plan = solve(level)
    assert (None if plan is None else len(plan)) == breadth_first(level)


def test_the_difficulty_band_is_kept():
    environment = SokobanEnv(min_moves=6, max_moves=8)
    for seed in range(30):
        _, info = environment.reset(seed=seed)
        assert 6 <= info["optimal_steps"] <= 8


def test_the_expert_solves_in_the_fewest_moves_even_after_a_detour():
    environment = SokobanEnv(size=(7, 7), boxes=2, min_moves=5)
    for seed in range(10):
        _, info = environment.reset(seed=seed, options={"expert": True})
        for _ in range(info["optimal_steps"]):
            *_, terminated, _, info = environment.step(info["expert_action"])
        assert terminated
    _, info = environment.reset(seed=3, options={"expert": True})
    environment.step("Up")
    _, _, _, _, info = environment.step("Down")
    for _ in range(100):
        *_, terminated, _, info = environment.step(info["expert_action"])
        if terminated:
            break
    assert terminated


def test_splits_hold_up_to_symmetry():
    seen = {}
    for split in ("train", "valid", "test"):
        environment = SokobanEnv(split=split)
        for seed in range(50):
            _, info = environment.reset(seed=seed)
            level = parse_level(info["state"]["level"])
            mirrored = parse_level("\n".join(row[::-1] for row in level.to_xsb().split("\n")))
            assert split_of(level) == split_of(mirrored) == split
            assert seen.setdefault(canonical_text(level), split) == split


def test_equal_seeds_give_equal_levels():
    boards = [SokobanEnv(boxes=2).reset(seed=11)[0] for _ in range(3)]
    assert len(set(boards)) == 1
    assert boards[0] != SokobanEnv(boxes=2).reset(seed=12)[0]


def test_seeds_that_find_no_hard_level_are_given_different_ones_and_info_says_so():
    environment = SokobanEnv(size=(6, 6), boxes=6)
    given = {}
    for seed in range(30):
        board, info = environment.reset(seed=seed)
        assert board.count("$") + board.count("*") == 6
        if "level_source" in info:
            given[seed] = board
            assert 0 <= info["level_source"]["example"] < EXAMPLES
    assert len(given) > 5, "this difficulty is hard to draw"
    assert len(set(given.values())) > 3
    again = SokobanEnv(size=(6, 6), boxes=6)
    assert all(again.reset(seed=seed)[0] == board for seed, board in given.items())
    assert "level_source" not in SokobanEnv().reset(seed=0)[1]


@pytest.mark.parametrize("vocabulary", sorted(VOCABULARIES))
def test_vocabularies_draw_the_same_board(vocabulary):
    environment = SokobanEnv(level=CORRIDOR, vocabulary=vocabulary)
    board, info = environment.reset(seed=0)
    symbols = VOCABULARIES[vocabulary]
    assert board == "".join(symbols.get(symbol, symbol) for symbol in info["state"]["level"])
    assert len(set(symbols.values())) == len(symbols)


def test_dead_squares_are_those_no_box_leaves():
    level = parse_level("######\n#@   #\n#  $ #\n#   .#\n######")
    dead = set(level.room.floor) - set(push_distances(level.room))
    corners = {1 * 6 + 1, 1 * 6 + 4, 3 * 6 + 1}
    assert corners <= dead
    environment = SokobanEnv(level=level.to_xsb(), dead_squares=True)
    assert set(environment.reset(seed=0)[1]["dead_squares"]) == dead


def test_the_checker_is_content():
    check_env(SokobanEnv(render_mode="ansi"))
    check_env(SokobanEnv(render_mode="rgb_array"))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"level": "#x#"}, "only"),
        ({"level": "####\n#@.#\n####"}, "as many boxes"),
        ({"level": "####\n#$.#\n####"}, "one player"),
        ({"size": [3, 3]}, "a list of 2 whole numbers from 4 to 20"),
        ({"vocabulary": "emoji"}, "vocabulary"),
        ({"split": "dev"}, "split must be one of"),
        ({"min_moves": 5, "max_moves": 2}, "below min_moves"),
    ],
)
def test_bad_kwargs_name_the_remedy(kwargs, message):
    with pytest.raises(ValueError, match=message):
        SokobanEnv(**kwargs)


@pytest.mark.parametrize("wishes", [((4, 4), 1, 60), ((20, 20), 6, 200)])
def test_wishes_that_contradict_each_other_are_told_soon(wishes):
    size, boxes, min_moves = wishes
    with pytest.raises(ValueError, match="loosen"):
        SokobanEnv(size=size, boxes=boxes, min_moves=min_moves).reset(seed=0)


def test_nobody_waits_long_for_the_optimum_of_a_level_that_a_client_gives():
    """Six boxes in an open hall have more positions than can be looked at."""
    hall = [[" "] * 14 for _ in range(14)]
    for place, symbol in enumerate("$$$$$$......@"):
        hall[2 + 2 * (place % 5)][2 + 4 * (place // 5)] = symbol
    rows = ["#" * 16, *(f"#{''.join(row)}#" for row in hall), "#" * 16]
    environment = SokobanEnv(level="\n".join(rows))
    _, info = environment.reset(seed=0, options={"expert": True})
    assert info["optimal_steps"] is None
    for _ in range(3):
        assert environment.step("Left")[4]["expert_action"] in ("Up", "Down", "Left", "Right")


def test_levels_have_a_largest_size():
    for rows in (
        ["#" * 65, "#@$." + " " * 60 + "#", "#" * 65],
        ["###", "#@#", "#$#", "#.#", *["# #"] * 60, "###"],
    ):
        with pytest.raises(ValueError, match="at most 64"):
            parse_level("\n".join(rows))


def test_levels_without_a_border_get_one():
    assert parse_level("@$.").to_xsb() == "#####\n#@$.#\n#####"
