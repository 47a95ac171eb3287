"""What holds for every small game, whatever its rules."""

import re
import subprocess
import sys

import pytest
from gymnasium.utils.env_checker import check_env
from hypothesis import given, settings
from hypothesis import strategies as st

from rollgym.clients.checks.declared import declared_baselines
from rollgym.clients.checks.local import ODD_TEXTS
from rollgym.envs.core.profiles import PROFILES
from rollgym.envs.core.text_game import TextGame
from rollgym.envs.registry import builtin_environments
from tests.support.processes import ROOT

OF_THEIR_OWN = {"FrozenLake-v0", "Sokoban-v0"}
"""These have tests of their own, and rules that no other game has."""
GAMES = {
    name: environment
    for name, environment in builtin_environments().items()
    if "rollgym.envs.games." in environment.path and name not in OF_THEIR_OWN
}
SPLITS = ("Countdown-v0", "TowerOfHanoi-v0", "Sudoku-v0", "Minesweeper-v0", "Maze-v0")
MARKS = {
    "native": "{}",
    "ragen": "<answer>{}</answer>",
    "roll": "<answer>{}</answer>",
    "verl-agent": "<think>so</think><action>{}</action>",
    "gem": "\\boxed{{{}}}",
}


def make(name, **kwargs):
    return GAMES[name].load()(**kwargs)


def solved_by_its_expert(name):
    """Whether a game has an expert, and luck does not decide."""
    baselines = declared_baselines(GAMES[name].load().metadata)
    return "expert" in baselines and baselines["expert"].solved == 1


def lists_its_actions(name):
    """Whether a game says which actions can be taken now."""
    return GAMES[name].load().available_actions is not TextGame.available_actions


def test_every_game_has_a_line_in_the_registry():
    folder = ROOT / "envs" / "games"
    written = {
        ".".join(path.relative_to(folder).with_suffix("").parts)
        for path in folder.rglob("*.py")
        if re.search(r"^class \w+\((?:Text|Named)Game\b", path.read_text(), re.MULTILINE)
    }
    paths = (environment.path.partition(":")[0] for environment in builtin_environments().values())
    assert len(written) > len(OF_THEIR_OWN)
    assert written - {path.removeprefix("rollgym.envs.games.") for path in paths} == set(), "envs/registry.py"


@pytest.mark.parametrize("name", GAMES)
def test_the_checker_is_content(name):
    check_env(make(name, render_mode="ansi"))


@pytest.mark.parametrize("name", [name for name in GAMES if solved_by_its_expert(name)])
def test_the_expert_solves_every_episode_no_slower_than_promised(name):
    environment = make(name)
    for seed in range(12):
        _, info = environment.reset(seed=seed, options={"expert": True})
        promised, steps, over = info["optimal_steps"], 0, False
        while not over:
            *_, terminated, truncated, info = environment.step(info["expert_action"])
            steps += 1
            over = terminated or truncated
        assert info["success"], seed
        assert promised is None or steps <= promised


@pytest.mark.parametrize("name", GAMES)
def test_a_reset_takes_only_the_options_that_the_game_names(name):
    environment = make(name)
    known = environment.metadata["reset_options"]
    assert ("split" in known) == (name in SPLITS)
    for options in ({"spilt": "train"}, {"expert": 1}, {"expert": "no"}):
        with pytest.raises(ValueError, match="the option"):
            environment.reset(seed=1, options=options)
    with pytest.raises(ValueError, match=", ".join(known)):
        environment.reset(seed=1, options={"": None})


@pytest.mark.parametrize("profile", sorted(PROFILES))
@pytest.mark.parametrize("name", GAMES)
def test_every_profile_plays_every_game(name, profile):
    environment = make(name, profile=profile)
    expert = environment.metadata["expert"]
    _, info = environment.reset(seed=1, options={"expert": True} if expert else None)
    said = info["expert_action"] if expert else info["available_actions"][0]
    *_, info = environment.step(MARKS[profile].format(said))
    assert info["action_is_valid"]


@pytest.mark.parametrize("name", GAMES)
def test_what_cannot_be_read_leaves_the_state_counts_and_costs_the_penalty(name):
    environment = make(name, format_penalty=-0.25, max_episode_steps=len(ODD_TEXTS) + 30)
    observation, before = environment.reset(seed=2)
    for number, text in enumerate(ODD_TEXTS, 1):
        answer, reward, terminated, truncated, info = environment.step(text)
        assert info["action_is_valid"] is False
        assert (reward, terminated, truncated) == (-0.25, False, False)
        assert answer.startswith("Invalid action.")
        assert answer.endswith(observation)
        assert (info["state"], info["anchor"]) == (before["state"], before["anchor"])
        assert info["metrics"]["steps"] == number


@pytest.mark.parametrize("name", GAMES)
def test_the_limit_truncates(name):
    kwargs = {"pulls": 3} if name == "Bandit-v0" else {}
    environment = make(name, max_episode_steps=3, **kwargs)
    environment.reset(seed=4)
    flags = [environment.step("nonsense")[2:4] for _ in range(3)]
    assert flags == [(False, False), (False, False), (False, True)]


@settings(max_examples=12)
@given(seed=st.integers(0, 2**32), data=st.data())
@pytest.mark.parametrize("name", [name for name in GAMES if lists_its_actions(name)])
def test_all_listed_actions_can_be_taken(name, seed, data):
    environment = make(name)
    _, info = environment.reset(seed=seed)
    for _ in range(6):
        *_, terminated, truncated, info = environment.step(
            data.draw(st.sampled_from(info["available_actions"]))
        )
        assert info["action_is_valid"]
        if terminated or truncated:
            break


@pytest.mark.parametrize("name", GAMES)
def test_what_info_says_of_the_state_is_a_copy(name):
    environment = make(name)
    first, info = environment.reset(seed=5)
    for value in info["state"].values():
        if isinstance(value, list):
            value.clear()
    if "available_actions" in info:
        info["available_actions"].clear()
    again, told = environment.reset(seed=5)
    assert again == first
    assert told["state"] == make(name).reset(seed=5)[1]["state"]


@pytest.mark.parametrize("name", SPLITS)
def test_splits_are_of_different_tasks(name):
    seen = {}
    for split in ("train", "valid", "test"):
        environment = make(name, split=split)
        for seed in range(15):
            board, _ = environment.reset(seed=seed, options={"expert": True})
            if name == "Minesweeper-v0":
                environment.step("reveal 1 1")
                board = str(sorted(environment._field.mines))
            assert seen.setdefault(board, split) == split
    assert set(seen.values()) == {"train", "valid", "test"}


def test_equal_seeds_are_equal_in_every_process():
    program = (
        "from tests.envs.games.test_games import GAMES, make\n"
        "from rollgym.clients.checks.trace import trace\n"
        "for name in GAMES:\n"
        "    print(name, trace(make(name, max_episode_steps=40)))"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": salt}, capture_output=True, check=True
        ).stdout
        for salt in ("1", "7")
    }
    assert len(outputs) == 1


def test_no_expert_where_there_is_none():
    with pytest.raises(ValueError, match="no expert"):
        make("Game2048-v0").reset(seed=0, options={"expert": True})


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("Countdown-v0", {"count": 7}, "count must be"),
        ("Countdown-v0", {"target": [9, 3]}, "least and its greatest"),
        ("Bandit-v0", {"arms": 1}, "arms must be"),
        ("Bandit-v0", {"pulls": 50}, "pulls must be"),
        ("GuessNumber-v0", {"low": 5, "high": 5}, "low must be below high"),
        ("TowerOfHanoi-v0", {"disks": 3, "min_moves": 8}, "min_moves must be"),
        ("TowerOfHanoi-v0", {"random_start": False, "split": "test"}, "random_start"),
        ("Game2048-v0", {"target": 100}, "one of 8, 16, .* or 131072, not 100"),
        ("Sudoku-v0", {"size": 9, "clues": 10}, "clues must be"),
        ("Mastermind-v0", {"length": 8, "colours": 9}, "fewer colours"),
        ("Mastermind-v0", {"length": 4, "colours": 3, "duplicates": False}, "as many colours"),
        ("Minesweeper-v0", {"mines": 30}, "mines must be"),
        ("Maze-v0", {"min_path": 9, "max_path": 3}, "min_path"),
        ("Maze-v0", {"show": "radar"}, "show must be"),
        ("Maze-v0", {"split": "dev"}, "split must be"),
        ("Blackjack-v0", {"profile": "mine"}, "profile must be"),
        ("Blackjack-v0", {"max_episode_steps": 0}, "at least 1"),
        ("Blackjack-v0", {"render_mode": "rgb_array"}, "render_mode must be 'ansi' or None"),
    ],
)
def test_bad_kwargs_name_the_remedy(name, kwargs, message):
    with pytest.raises(ValueError, match=message):
        make(name, **kwargs)
