"""Environments of a real server as GEM and ROLL use them, with the real `gem-llm` where it is installed."""

import importlib.util
import json
import subprocess
from collections import UserDict, UserList
from types import ModuleType

import pytest

from rollgym.integrations.gem import RemoteGemEnv, register
from tests.integrations.pages import blocks, run_block
from tests.support.client_server import ServerProcess
from tests.support.processes import ROOT

LAKE = {"map": ["SFF", "FFF", "FFG"]}


@pytest.fixture
def gem():
    return pytest.importorskip(
        "gem", reason="gem-llm is installed by .ci/peers, in an environment of its own"
    )


def play(env: RemoteGemEnv, seed: int, actions: list[str]) -> list[tuple]:
    env.reset(seed=seed)
    return [env.step(action) for action in actions]


def test_a_reset_gives_the_rules_where_roll_reads_them(server: ServerProcess) -> None:
    env = RemoteGemEnv(server.url, "FrozenLake-v0", LAKE)
    observation, info = env.reset(seed=3)
    assert observation == "P__\n___\n__G"
    assert "frozen lake" in info["env_instruction"]
    assert "instruction" not in info
    env.close()


def test_metrics_say_how_they_are_aggregated(server: ServerProcess) -> None:
    env = RemoteGemEnv(server.url, "FrozenLake-v0", LAKE)
    *_, last = play(env, 0, ["nonsense", "Right", "Right", "Down", "Down"])
    _, reward, terminated, truncated, info = last
    assert (reward, terminated, truncated) == (1.0, True, False)
    assert info["metrics"]["success"] == 1.0
    assert info["metrics"]["invalid_replies"] == 1.0
    assert set(info["metrics_agg_mode"]) == set(info["metrics"])
    assert set(info["metrics_agg_mode"].values()) <= {"mean", "last", "sum", "min", "max", "first"}
    env.close()


def test_an_episode_at_its_limit_is_over_for_who_looks_at_its_termination_alone(
    server: ServerProcess,
) -> None:
    env = RemoteGemEnv(server.url, "FrozenLake-v0", LAKE, max_episode_steps=2)
    first, last = play(env, 0, ["Right", "Left"])
    assert (first[2:4], last[2:4]) == ((False, False), (True, True))
    env.close()


def test_no_messages_replace_those_of_the_agent(server: ServerProcess) -> None:
    env = RemoteGemEnv(server.url, "ToolUse-v0")
    _, info = env.reset(seed=0)
    assert "messages" not in info
    *_, info = env.step('<tool_call>{"name": "calculator", "arguments": {"expression": "1+1"}}</tool_call>')
    assert "messages" not in info
    assert info["metrics"]["tool_calls"] == 1.0
    env.close()


def test_kwargs_of_the_environment_may_stand_beside_the_others(server: ServerProcess) -> None:
    env = RemoteGemEnv(server.url, "FrozenLake-v0", size=3, hole_density=0.0)
    observation, _ = env.reset(seed=0)
    assert len(observation.splitlines()) == 3
    env.close()


def test_lists_and_mappings_of_a_configuration_library_are_plain_data_on_the_wire(
    server: ServerProcess,
) -> None:
    kwargs = UserDict({"map": UserList(["SFF", "FFF", "FFG"])})
    env = RemoteGemEnv(server.url, "FrozenLake-v0", kwargs)
    try:
        observation, _ = env.reset(seed=0)
        assert "_" in observation
    finally:
        env.close()


def test_the_seed_of_the_constructor_is_that_of_the_first_episode(server: ServerProcess) -> None:
    first, second = (RemoteGemEnv(server.url, "Countdown-v0", seed=11) for _ in range(2))
    assert first.reset() == second.reset()
    assert first.reset(seed=11)[0] == second.reset(seed=11)[0]
    assert first.spawn(seed=11).reset()[0] == RemoteGemEnv(server.url, "Countdown-v0").reset(seed=11)[0]


def test_random_actions_are_those_that_the_environment_names(server: ServerProcess) -> None:
    env = RemoteGemEnv(server.url, "FrozenLake-v0")
    env.reset(seed=0)
    assert env.sample_random_action() in ("Left", "Down", "Right", "Up")
    env.close()


def test_an_environment_that_is_not_text_is_refused(server: ServerProcess) -> None:
    with pytest.raises(ValueError, match="--gymnasium-text"):
        RemoteGemEnv(server.url, "CartPole-v1")


def test_gem_makes_it_as_roll_does(server: ServerProcess, gem) -> None:
    register()
    config = {"url": server.url, "environment": "FrozenLake-v0", "env_kwargs": LAKE}
    env = gem.make(env_id="rollgym", **config)
    assert env.env_id == "rollgym"
    trajectories = [episode_of_roll(env, seed) for seed in (5, 5)]
    assert trajectories[0] == trajectories[1]
    assert trajectories[0]["metrics"]["success"] == 1.0
    assert trajectories[0]["score"] == 1.0
    assert "frozen lake" in trajectories[0]["history"][0]["env_instruction"]


def test_gem_makes_many(server: ServerProcess, gem) -> None:
    register(url=server.url, environment="FrozenLake-v0")
    envs = gem.make_vec(["rollgym"] * 3, seed=20)
    observations, _ = envs.reset()
    alone = [RemoteGemEnv(server.url, "FrozenLake-v0").reset(seed=20 + index)[0] for index in range(3)]
    assert list(observations) == alone
    envs.step(["Left"] * 3)


def test_the_page_is_right(server: ServerProcess, gem) -> None:
    """The program of docs/coming_from/verl_and_roll.md."""
    from gem.envs import registration

    registration.ENV_REGISTRY.pop("rollgym", None)
    (block,) = blocks("verl_and_roll.md")
    names = run_block(block.text, server)
    assert names["env"].env_id == "rollgym"
    assert names["info"]["metrics_agg_mode"]["success"] == "last"
    names["env"].close()


def loaded_alone() -> ModuleType:
    """The example for Python 3.10, as a user loads it who has that file and no more."""
    spec = importlib.util.spec_from_file_location("roll_python310", ROOT / "examples" / "roll_python310.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_file_for_python_310_plays_as_the_package_does(server: ServerProcess) -> None:
    kwargs = UserDict({"map": UserList(["SFF", "FFF", "FFG"])})
    env = loaded_alone().HttpGemEnv(server.url, "FrozenLake-v0", kwargs)
    ours = RemoteGemEnv(server.url, "FrozenLake-v0", LAKE)
    told, wanted = episode_of_roll(env, 5), episode_of_roll(ours, 5)
    assert told["score"] == wanted["score"] == 1.0
    for mine, other in zip(told["history"], wanted["history"], strict=True):
        assert mine["observation"] == other["observation"]
        assert mine.get("env_instruction") == other.get("env_instruction")
        assert mine["metrics"].items() <= other["metrics"].items()
    env.close()
    ours.close()


def test_the_file_for_python_310_says_why_the_server_refuses(server: ServerProcess) -> None:
    env = loaded_alone().HttpGemEnv(server.url, "FrozenLake-v0", siz=4)
    with pytest.raises(RuntimeError, match="did you mean 'size'"):
        env.reset(seed=0)


def test_the_file_for_python_310_runs_there(server: ServerProcess) -> None:
    # A version manager's command may find no interpreter: the interpreter itself says where it is.
    name = "import sys; print(sys.executable)"
    try:
        found = subprocess.run(["python3.10", "-c", name], capture_output=True, text=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        pytest.skip("there is no Python 3.10")
    python = found.stdout.strip()
    program = (
        "import json, sys, roll_python310\n"
        "env = roll_python310.HttpGemEnv(sys.argv[1], 'FrozenLake-v0', json.loads(sys.argv[2]))\n"
        "env.reset(seed=0)\n"
        "print([env.step(action)[1] for action in ('Right', 'Right', 'Down', 'Down')])\n"
        "env.close()\n"
    )
    done = subprocess.run(
        [python, "-c", program, server.url, json.dumps(LAKE)],
        env={"PYTHONPATH": str(ROOT / "examples")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "[0.0, 0.0, 0.0, 1.0]\n", done.stderr


def episode_of_roll(env, seed: int) -> dict:
    """What ROLL's manager of trajectories asks of an environment, in its order."""
    observation, info = env.reset(seed=seed)
    history = [{"observation": observation, **info}]
    moves = iter(["Right", "Right", "Down", "Down"])
    score, per_step = 0.0, []
    for action in moves:
        observation, reward, terminated, _truncated, info = env.step(action=action)
        history[-1] |= {"reward": reward, "llm_response": action}
        history[-1].update(info)
        assert isinstance(info["metrics"], dict)
        per_step.append(info["metrics"])
        score += reward
        if terminated:
            break
        history.append({"observation": observation})
    modes = history[-1]["metrics_agg_mode"]
    metrics = {}
    for name, mode in modes.items():
        values = [step[name] for step in per_step if name in step]
        metrics[name] = {
            "last": values[-1], "first": values[0], "sum": sum(values), "min": min(values), "max": max(values),
            "mean": sum(values) / len(values),
        }[mode]  # fmt: skip
    return {"history": history, "metrics": metrics, "score": score}
