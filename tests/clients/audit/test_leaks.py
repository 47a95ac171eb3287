"""Where answers are looked for."""

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from rollgym.clients.audit.leaks import extracts
from rollgym.clients.audit.policies import ActionWording
from rollgym.clients.protocol.spaces import UnicodeText

PLAIN = ActionWording()
KEYS = st.sampled_from(["debug", "target", "data", "x"])
PATHS = st.lists(KEYS | st.integers(0, 3), min_size=1, max_size=5).filter(
    lambda path: isinstance(path[0], str)
)


def nested(path: list[Any], value: Any) -> Any:
    for part in reversed(path):
        value = {part: value, "other": None} if isinstance(part, str) else [None] * part + [value]
    return value


def found(
    space: spaces.Space, observation: Any, info: Any, step: int = 0, wording: ActionWording = PLAIN
) -> dict[str, Any]:
    return {
        extract.name: extract.read(observation, info, step)
        for extract in extracts(space, observation, info, wording, reads_instruction=False)
    }


@given(path=PATHS, value=st.text("abc ", min_size=1, max_size=20) | st.integers(0, 99))
def test_a_value_anywhere_in_info_is_found(path: list[Any], value: Any) -> None:
    info = nested(path, value)
    assert str(value) in found(UnicodeText(), "seen", info).values()
    if isinstance(value, int):
        assert value in found(spaces.Discrete(100), None, info).values()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
)


@given(info=st.dictionaries(st.text(max_size=8), JSON, max_size=4), seen=JSON, other=JSON)
def test_whatever_comes_is_read_without_a_failure(info: dict[str, Any], seen: Any, other: Any) -> None:
    """Places are found in one info and read in another, which may look quite different."""
    for space in (UnicodeText(), spaces.Discrete(5), spaces.Box(0, 1, (2,))):
        for extract in extracts(space, seen, info, PLAIN, reads_instruction=True):
            for later in (info, {}, dict.fromkeys(info, other)):
                action = extract.read(other, later, 1)
                assert action is None or action in space


@pytest.mark.parametrize(
    ("observation", "answer"),
    [
        ("What is 3 + 4? The answer is: 7.", "7"),
        ("Question\nparis", "paris"),
        ("blue is not red, and red is not green", "blue"),
    ],
)
def test_a_text_is_read_in_many_ways(observation: str, answer: str) -> None:
    assert answer in found(UnicodeText(), observation, {}).values()


def test_a_list_is_said_one_element_a_turn_in_the_wording_of_the_environment() -> None:
    info = {"plan": ["Left", "Down"], "hint": "Up then Right"}
    tags = ActionWording("<answer>", "</answer>")
    assert "<answer>Down</answer>" in found(UnicodeText(), "", info, 1, tags).values()
    assert found(UnicodeText(), "", info, 2)["info['hint'], one after the other"] == "Right"
    assert found(UnicodeText(), "", info, 2)["info['plan'], one after the other"] is None


def test_arrays_give_actions_of_their_space() -> None:
    values = found(spaces.Discrete(4), np.array([2.0, 2.5, 9.0]), {})
    assert values["observation[0]"] == 2
    assert values["observation[1]"] is None
    assert values["observation[2]"] is None


def test_what_every_info_says_is_no_answer() -> None:
    info = {
        "success": True,
        "action_is_valid": True,
        "instruction": "Reply.",
        "available_actions": ["a", "b", "c"],
    }
    assert set(found(UnicodeText(), 0, info)) <= {
        *("info['available_actions'][0]", "info['available_actions'][0], one after the other"),
        *("info['available_actions'][-1]", "info['available_actions'][-1], one after the other"),
        "observation",
    }
