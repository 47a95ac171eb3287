"""The environment passes the checks of Gymnasium and rollgym, and can be solved."""

import json
from typing import Any

from gymnasium.utils.env_checker import check_env
from rollgym import check_environment

from scaffold_name import ScaffoldName


def call(name: str, **arguments: Any) -> str:
    """Return a call as the model writes it, in the format `hermes`."""
    text = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{text}\n</tool_call>"


def test_it_passes_the_check_of_gymnasium() -> None:
    check_env(ScaffoldName(), skip_render_check=True)


def test_it_passes_the_check_of_rollgym() -> None:
    check_environment("scaffold_name.environment:ScaffoldName")


def test_the_expert_solves_every_task() -> None:
    env = ScaffoldName()
    for seed in range(20):
        _, info = env.reset(seed=seed, options={"expert": True})
        reward, ended = 0.0, False
        while not ended:
            _, reward, terminated, truncated, info = env.step(info["expert_action"])
            ended = terminated or truncated
        assert reward == 1.0
        assert info["success"]


def test_what_a_tool_cannot_do_is_its_result() -> None:
    env = ScaffoldName()
    env.reset(seed=1)
    text, reward, terminated, *_ = env.step(call("stock", item="'; DROP TABLE stock"))
    assert "no such item" in text
    assert (reward, terminated) == (0.0, False)
    text, *_ = env.step(call("order", item="lamps", count=10**30))
    assert "at most 1000" in text


def test_an_order_that_was_not_asked_for_earns_nothing() -> None:
    env = ScaffoldName()
    env.reset(seed=1)
    env.step(call("order", item="lamps", count=1))
    env.step(call("order", item="lamps", count=1))
    _, reward, terminated, _, info = env.step("done")
    assert (reward, terminated, info["success"]) == (0.0, True, False)
