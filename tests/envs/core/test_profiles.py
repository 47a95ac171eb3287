"""How replies are read, with every trap that other readers fell into."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollgym.envs.core.profiles import PROFILES, name_table, named_action, said_actions
from rollgym.envs.games.frozen_lake import FrozenLakeEnv
from rollgym.envs.games.sokoban.environment import SokobanEnv

NAMES = name_table(("Up", "Down", "Left", "Right"))


def read_actions(reply, profile, limit=1):
    read = [named_action(text, profile, NAMES) for text in said_actions(reply, profile, limit)]
    return [action for action in read if action is not None]


@pytest.mark.parametrize(
    ("profile", "reply", "expected"),
    [
        ("native", "Up", [0]),
        ("native", "  down \n", [1]),
        ("native", "<answer>Right</answer>", [3]),
        ("native", "<ANSWER> right </ANSWER>", [3]),
        ("native", "<answer>Up</answer> no: <answer>Left</answer>", [2]),
        ("native", "<think><answer>Up</answer></think><answer>Down</answer>", [1]),
        ("native", "<think><answer>Up</answer>", []),
        ("native", "I go Up", []),
        ("native", "<answer>Up, Right</answer>", []),
        ("native", "<answer>'Up'.</answer>", [0]),
        ("native", "<answer>Up</answer><|im_end|>", [0]),
        ("native", "<answer>↑</answer>", []),
        ("native", "", []),
        ("ragen", "<answer>Up</answer><answer>Left</answer>", [0]),
        ("ragen", "Up", []),
        ("roll", "<think><answer>Up</answer></think><answer>Down</answer>", [1]),
        ("verl-agent", "<action>up</action>, so I thought</think><action>go down now</action>", [1]),
        ("verl-agent", "<action>go up now</action>", []),
        ("verl-agent", "<think>so</think><action>go up now</action>", [0]),
        ("gem", "so \\boxed{Up} or \\boxed{down}", [1]),
        ("gem", "<answer>Up</answer>", []),
    ],
)
def test_one_action(profile, reply, expected):
    assert read_actions(reply, PROFILES[profile]) == expected


def test_several_actions_up_to_a_limit():
    reply = "<answer>Up || left||jump|| Down || Right</answer>"
    assert read_actions(reply, PROFILES["ragen"], limit=4) == [0, 2, 1]


@given(profile=st.sampled_from(sorted(PROFILES)), reply=st.text(), limit=st.integers(1, 5))
def test_no_reply_is_an_error(profile, reply, limit):
    actions = read_actions(reply, PROFILES[profile], limit)
    assert len(actions) <= limit
    assert set(actions) <= set(range(4))


@pytest.mark.parametrize("make", [FrozenLakeEnv, SokobanEnv])
@pytest.mark.parametrize("profile", sorted(PROFILES))
def test_every_profile_plays_every_grid_game(make, profile):
    environment = make(profile=profile)
    observation, info = environment.reset(seed=1, options={"expert": True})
    assert info["instruction"]
    assert environment.draw_board() in observation
    wrapped = {
        "answer": "<answer>{}</answer>",
        "action": "<think>so</think><action>{}</action>",
        "boxed": "\\boxed{{{}}}",
    }[environment.profile.mark]
    over = False
    for _ in range(100):
        *_, terminated, truncated, info = environment.step(wrapped.format(info["expert_action"]))
        assert info["action_is_valid"]
        if over := terminated or truncated:
            break
    assert over
    assert info["success"]


def test_what_an_invalid_reply_costs():
    costs = {}
    for profile in PROFILES:
        environment = SokobanEnv(profile=profile)
        environment.reset(seed=0)
        _, reward, _, _, info = environment.step("@@@")
        costs[profile] = (round(reward, 6), info["metrics"]["steps"])
    assert costs == {
        "native": (-0.1, 1),
        "ragen": (-0.1, 0),
        "roll": (-0.2, 1),
        "verl-agent": (-0.1, 0),
        "gem": (-0.2, 1),
    }


def test_replies_that_cost_no_step_still_end():
    environment = FrozenLakeEnv(profile="ragen", max_episode_steps=5)
    environment.reset(seed=0)
    ends = [environment.step("?")[3] for _ in range(5)]
    assert ends == [False, False, False, False, True]
