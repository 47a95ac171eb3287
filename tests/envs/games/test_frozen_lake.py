"""FrozenLake-v0 is Gymnasium's FrozenLake-v1 in words."""

import itertools
import subprocess
import sys

import gymnasium
import pytest
from gymnasium.envs.toy_text.frozen_lake import generate_random_map
from gymnasium.utils.env_checker import check_env
from hypothesis import given, settings
from hypothesis import strategies as st

from rollgym.envs.games.frozen_lake import ACTIONS, FrozenLakeEnv, goal_distances, split_of

maps = st.builds(
    lambda seed, size: generate_random_map(size=size, p=0.7, seed=seed),
    st.integers(0, 10**6),
    st.integers(2, 6),
)


@settings(max_examples=40)
@given(rows=maps, slippery=st.booleans(), rate=st.sampled_from([1 / 3, 0.8, 1.0]))
def test_transitions_are_gymnasiums(rows, slippery, rate):
    ours = FrozenLakeEnv(map=rows, is_slippery=slippery, success_rate=rate, reward_schedule=[2, -1, 0.5])
    theirs = gymnasium.make(
        "FrozenLake-v1", desc=rows, is_slippery=slippery, success_rate=rate, reward_schedule=(2, -1, 0.5)
    ).unwrapped
    table = ours.transition_table()
    assert table.keys() == theirs.P.keys()
    for state, actions in theirs.P.items():
        for action, outcomes in actions.items():
            expected = [(p, int(cell), reward, bool(done)) for p, cell, reward, done in outcomes]
            assert table[state][action] == [pytest.approx(entry) for entry in expected]


@settings(max_examples=30)
@given(rows=maps, moves=st.lists(st.integers(0, 3), max_size=40))
def test_traces_are_gymnasiums(rows, moves):
    ours = FrozenLakeEnv(map=rows)
    theirs = gymnasium.make("FrozenLake-v1", desc=rows, is_slippery=False)
    _, info = ours.reset(seed=0)
    position, _ = theirs.reset(seed=0)
    assert info["state"] == {"position": position, "rows": rows}
    for move in moves:
        _, reward, terminated, truncated, info = ours.step(ACTIONS[move])
        position, *expected, _ = theirs.step(move)
        assert (info["state"]["position"], reward, terminated, truncated) == (position, *expected)
        if terminated:
            assert info["success"] == (reward == 1)
            break


@settings(max_examples=20)
@given(seed=st.integers(0, 1000))
def test_slippery_outcomes_follow_the_table(seed):
    """Given the same random draws, the same outcomes: the generator is Gymnasium's and is read in its order."""
    rows = ["SFFF", "FFFF", "FFFF", "FFFG"]
    ours = FrozenLakeEnv(map=rows, is_slippery=True)
    ours.reset(seed=seed)
    draws, _ = gymnasium.utils.seeding.np_random(seed)
    table = ours.transition_table()
    position = 0
    for move in (1, 2, 1, 2, 2, 1):
        draw = draws.random()
        sums = itertools.accumulate(entry[0] for entry in table[position][move])
        place = next(place for place, total in enumerate(sums) if total > draw)
        probability, reached, _, _ = table[position][move][place]
        *_, info = ours.step(ACTIONS[move])
        assert (info["state"]["position"], info["prob"]) == (reached, pytest.approx(probability))
        position = reached


def test_the_checker_is_content():
    for profile in ("native", "ragen", "roll", "verl-agent", "gem"):
        check_env(FrozenLakeEnv(profile=profile, render_mode="ansi"))
    check_env(FrozenLakeEnv(render_mode="rgb_array"))


def test_an_unreadable_reply_costs_a_step_and_the_penalty_and_nothing_else():
    environment = FrozenLakeEnv(map=["SF", "FG"], format_penalty=-0.25, max_episode_steps=2)
    board, _ = environment.reset(seed=0)
    text, reward, terminated, truncated, info = environment.step("hop")
    assert (text, reward, terminated, truncated) == (f"Invalid action.\n{board}", -0.25, False, False)
    assert (info["action_is_valid"], info["format_penalty"], info["env_reward"]) == (False, -0.25, 0.0)
    *_, truncated, _ = environment.step("")
    assert truncated


def test_several_actions_in_one_turn():
    environment = FrozenLakeEnv(map=["SFF", "FHF", "FFG"], max_actions_per_turn=3)
    environment.reset(seed=0)
    _, reward, terminated, _, info = environment.step("<answer>Right || Right || Down || Down</answer>")
    assert (info["state"]["position"], info["metrics"]["steps"], terminated) == (5, 3, False)
    _, reward, terminated, _, info = environment.step("<answer>down||Up</answer>")
    assert (reward, terminated, info["metrics"]["steps"]) == (1.0, True, 4)


def test_the_expert_takes_a_shortest_path():
    environment = FrozenLakeEnv(size=6, hole_density=0.35)
    for seed in range(40):
        _, info = environment.reset(seed=seed, options={"expert": True})
        steps = info["optimal_steps"]
        for _ in range(steps):
            *_, terminated, _, info = environment.step(info["expert_action"])
        assert terminated
        assert info["success"]


def test_the_expert_on_ice_beats_walking_straight():
    environment = FrozenLakeEnv(map=["SFFF", "FHFH", "FFFH", "HFFG"], is_slippery=True)
    solved = 0
    for seed in range(100):
        _, info = environment.reset(seed=seed, options={"expert": True})
        over = False
        while not over:
            *_, terminated, truncated, info = environment.step(info["expert_action"])
            over = terminated or truncated
        solved += info["success"]
    # The optimal policy of this map solves 0.82 of unlimited episodes; 100 steps cut some.
    assert 0.62 < solved / 100 < 0.86


def test_splits_are_disjoint_by_content():
    seen = {}
    for split in ("train", "valid", "test"):
        environment = FrozenLakeEnv(split=split)
        for seed in range(60):
            _, info = environment.reset(seed=seed)
            rows = tuple(info["state"]["rows"])
            assert split_of(rows) == split
            assert seen.setdefault(rows, split) == split


def test_path_lengths_are_kept():
    environment = FrozenLakeEnv(size=5, hole_density=0.4, min_path=10, max_path=12)
    for seed in range(20):
        _, info = environment.reset(seed=seed)
        assert 10 <= info["optimal_steps"] <= 12
    assert goal_distances(("SHG",)) == [-1, -1, 0]


def test_equal_seeds_are_equal_in_every_process():
    program = (
        "from rollgym.envs.games.frozen_lake import FrozenLakeEnv\n"
        "e = FrozenLakeEnv(random_start=True, is_slippery=True)\n"
        "for s in range(5):\n"
        "    print(e.reset(seed=s)[0], [e.step(a)[0] for a in ('Up', 'Down', 'Right')])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": salt}, capture_output=True, check=True
        ).stdout
        for salt in ("1", "7")
    }
    assert len(outputs) == 1


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"map": ["SX", "FG"]}, "letters S, F, H and G"),
        ({"map": ["SF", "G"]}, "same length"),
        ({"map": ["FF", "FG"]}, "one start"),
        ({"map": ["S" + "F" * 63 + "G"]}, "at most 64"),
        ({"map": ["S", *"F" * 63, "G"]}, "at most 64"),
        ({"profile": "nativ"}, "profile must be one of"),
        ({"map": 5}, "map must be a list of texts or None, not 5"),
        ({"split": "dev"}, "split must be one of"),
        ({"reward_schedule": [float("inf"), 0, 0]}, "must be finite"),
        ({"min_path": 9, "max_path": 3}, "below min_path"),
        ({"hole_density": 2.0}, "hole_density"),
        ({"size": 1}, "size"),
        ({"max_episode_steps": 0}, "max_episode_steps"),
        ({"reward_schedule": [1]}, "a list of 3 numbers"),
        ({"render_mode": "human"}, "render_mode"),
    ],
)
def test_bad_kwargs_name_the_remedy(kwargs, message):
    with pytest.raises(ValueError, match=message):
        FrozenLakeEnv(**kwargs)


@pytest.mark.parametrize(
    "wishes", [{"size": 2, "min_path": 9}, {"size": 64, "hole_density": 0.6, "min_path": 300}]
)
def test_wishes_that_contradict_each_other_are_told_soon(wishes):
    with pytest.raises(ValueError, match="loosen"):
        FrozenLakeEnv(**wishes).reset(seed=0)
