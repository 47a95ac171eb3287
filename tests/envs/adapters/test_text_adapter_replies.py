"""The text adapter: how it reads replies."""

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from rollgym.envs.adapters.text import TextAdapter
from rollgym.envs.adapters.text_spaces import action_text
from tests.support.echo_env import Echo

LAKE = "FrozenLake-v1"
POLE = "CartPole-v1"


def read(space, text, actions=None, inside="exact"):
    return action_text(space, actions).read(text, inside)


def test_an_unreadable_reply_costs_a_step_and_the_penalty_and_changes_nothing():
    adapter = TextAdapter(POLE, format_penalty=-0.25, max_episode_steps=3)
    shown, first = adapter.reset(seed=0)
    text, reward, terminated, truncated, info = adapter.step("<answer>Up</answer>")
    assert (text, reward, terminated, truncated) == (f"Invalid action.\n{shown}", -0.25, False, False)
    assert (info["action_is_valid"], info["format_penalty"], info["env_reward"]) == (False, -0.25, 0.0)
    assert np.array_equal(info["state"]["observation"], first["state"]["observation"])
    assert info["metrics"] == {"steps": 1, "invalid_replies": 1}
    _, reward, *_, info = adapter.step("Left")
    assert (reward, info["action_is_valid"], info["metrics"]["steps"]) == (1.0, True, 2)
    assert adapter.step("what?")[2:4] == (False, True)


@settings(max_examples=200)
@given(reply=st.text(max_size=60), profile=st.sampled_from(["native", "ragen", "roll", "verl-agent", "gem"]))
def test_no_reply_raises(reply, profile):
    for name in (POLE, "Pendulum-v1"):
        adapter = TextAdapter(name, profile=profile)
        adapter.reset(seed=0)
        for each in (reply, f"<answer>{reply}</answer>", f"<think></think><action>{reply}</action>"):
            text, reward, terminated, truncated, _ = adapter.step(each)
            assert isinstance(text, str)
            assert np.isfinite(reward)
            assert not terminated
            assert not truncated


@pytest.mark.parametrize(
    ("profile", "reply"),
    [
        ("native", "right"),
        ("native", "<think><answer>Left</answer></think> so <ANSWER> 'Right'. </ANSWER>"),
        ("ragen", "<answer>Right</answer><answer>Left</answer>"),
        ("roll", "I go <answer>1</answer>"),
        ("verl-agent", "<think>left?</think><action>push right now</action>"),
        ("gem", r"\boxed{Left} no, \boxed{right}"),
    ],
)
def test_replies_are_read_as_profiles_say(profile, reply):
    adapter, bare = TextAdapter(POLE, profile=profile), gymnasium.make(POLE)
    adapter.reset(seed=4)
    bare.reset(seed=4)
    info = adapter.step(reply)[4]
    assert info["action_is_valid"]
    assert np.array_equal(info["state"]["observation"], bare.step(1)[0])


def test_several_actions_in_one_reply():
    adapter = TextAdapter(POLE, max_actions_per_turn=3)
    adapter.reset(seed=0)
    _, reward, *_, info = adapter.step("<answer>Left || Right || up || Left</answer>")
    assert (reward, info["metrics"]["steps"], info["env_reward"]) == (2.0, 2, 2.0)
    adapter = TextAdapter(POLE, max_actions_per_turn=3, max_episode_steps=2)
    adapter.reset(seed=0)
    assert adapter.step("<answer>Left||Right||Left</answer>")[1:4] == (2.0, False, True)


@pytest.mark.parametrize(
    ("space", "text", "expected"),
    [
        (spaces.Discrete(3), " 2. ", 2),
        (spaces.Discrete(3), "3", None),
        (spaces.Discrete(3, start=-1), "-1", -1),
        (spaces.Discrete(3), "²", None),
        (spaces.Discrete(1000), "999", 999),
        (spaces.Discrete(1000), "1000", None),
        (spaces.Discrete(1000), "7, 8", None),
        (spaces.Discrete(1000), "1.0", None),
        (spaces.MultiDiscrete([3, 2]), "2, 1", [2, 1]),
        (spaces.MultiDiscrete([3, 2]), "[2 1]", [2, 1]),
        (spaces.MultiDiscrete([3, 2]), "(2; 1).", [2, 1]),
        (spaces.MultiDiscrete([3, 2]), "2, 2", None),
        (spaces.MultiDiscrete([3, 2]), "2", None),
        (spaces.MultiDiscrete([3, 2]), "99999999999999999999, 0", None),
        (spaces.MultiBinary(3), "1 0 1", [1, 0, 1]),
        (spaces.MultiBinary(3), "1 0 2", None),
        (spaces.Box(-1, 1, (2,)), ".5, -1", [0.5, -1]),
        (spaces.Box(-1, 1, (2,)), "−0.25, 1e-1.", [-0.25, 0.1]),
        (spaces.Box(-1, 1, (2,)), "0.5, 1.01", None),
        (spaces.Box(-1, 1, (2,)), "nan, 0", None),
        (spaces.Box(-np.inf, np.inf, (1,)), "1e300", None),
        (spaces.Box(-np.inf, np.inf, (1,)), "inf", None),
        (spaces.Box(0.1, 0.9, ()), "0.1", 0.1),
        (spaces.Box(0, 9, (2,), np.int32), "3, 4", [3, 4]),
        (spaces.Box(0, 9, (2,), np.int32), "3.5, 4", None),
        (spaces.Box(-1, 1, (2,)), "0" * 100_000, None),
    ],
)
def test_numbers(space, text, expected):
    found = read(space, text)
    if expected is None:
        assert found is None
    else:
        assert space.contains(found)
        assert np.allclose(found, expected)


@pytest.mark.parametrize(
    ("space", "text", "expected"),
    [
        (spaces.Discrete(20), "I take 12 now", 12),
        (spaces.Discrete(20), "99 or 3", 3),
        (spaces.MultiDiscrete([3, 3]), "first 1 then 2", [1, 2]),
        (spaces.MultiDiscrete([3, 3]), "1, 2, 0", None),
    ],
)
def test_numbers_within_what_is_said(space, text, expected):
    found = read(space, text, inside="contains")
    assert (None if found is None else np.asarray(found).tolist()) == expected


def test_longer_names_win_over_those_within_them():
    assert read(spaces.Discrete(2), "i jump up", ["up", "jump up"], "contains") == 1


def test_names_that_are_numbers_are_names():
    names = ["1", "2"]
    assert [read(spaces.Discrete(2), each, names) for each in ("1", "2", "0")] == [0, 1, None]


def test_names_of_any_action():
    space = spaces.Dict(wheel=spaces.Discrete(3), gas=spaces.Box(0, 1, (1,)))
    echo = Echo(space)
    adapter = TextAdapter(
        echo, actions={"Go": {"wheel": 1, "gas": [1.0]}, "Wait": {"wheel": 1, "gas": [0.0]}}
    )
    assert adapter.reset(seed=0)[1]["available_actions"] == ["Go", "Wait"]
    adapter.step("go")
    echo.taken[0]["gas"][0] = 0.5
    adapter.step("go")
    assert echo.taken[1]["gas"] == [1.0], "what the environment does to an action is undone for the next"
    assert adapter.step("1")[4]["action_is_valid"] is False


@pytest.mark.parametrize(
    ("space", "description", "example"),
    [
        (spaces.Discrete(3, start=1), "1, 2, 3", "1"),
        (spaces.Box(-2, 2, (1,)), "one number from -2 to 2", "0"),
        (spaces.MultiBinary(2), "2 whole numbers, separated by commas, each from 0 to 1", "0, 0"),
        (
            spaces.MultiDiscrete([3, 2], start=[1, 0]),
            "2 whole numbers, separated by commas: from 1 to 3; from 0 to 1",
            "1, 0",
        ),
        (spaces.Box(0, np.inf, (1,)), "one number of at least 0", "0"),
        (spaces.Box(-np.inf, np.inf, (1,)), "one number", "0"),
    ],
)
def test_actions_are_described_and_the_example_is_one(space, description, example):
    actions = action_text(space, None)
    assert (actions.description, actions.example) == (description, example)
    assert space.contains(actions.read(example, "exact"))
