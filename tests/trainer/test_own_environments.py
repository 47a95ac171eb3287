"""Environments of the user's in `serve`, and `rollout` in one process."""

from pathlib import Path

import pytest

from tests.support.processes import read_lines, running, train
from tests.support.roll_train import console_script

MODULE = '''
import os

import gymnasium

from rollgym import UnicodeText


class Who(gymnasium.Env):
    """Says which process it is in; the episode ends with the first step."""

    def __init__(self):
        self.action_space = self.observation_space = UnicodeText()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return f"process {os.getpid()}", {"available_actions": ["yes"]}

    def step(self, action):
        return "over", 1.0, True, False, {"success": True}


class Stopping(Who):
    """Stops in the debugger."""

    def step(self, action):
        breakpoint()
        return super().step(action)
'''
COUNTDOWN = """
seed: 1
steps: 1
serve: ["Down=examples.custom_environment:Countdown"]
tasks: [{env_id: Down}]
model: {hidden_size: 32, layers: 1, heads: 2, max_length: 256}
prompt: {instruction: none}
rollout: {groups_per_step: 2, group_size: 2, max_turns: 2, max_new_tokens: 3}
evaluation:
  sets:
    down: {env_id: Down, episodes: 4}
    lake: {env_id: FrozenLake-v0, kwargs: {size: 4}, episodes: 4, max_turns: 4}
tracking: {tensorboard: false}
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "my_environments.py").write_text(MODULE)
    return tmp_path


@pytest.mark.slow
def test_rollout_plays_an_environment_in_its_own_process(directory):
    playing = ["rollout", "--policy", "random", "--episodes", "2", "--output", "played.jsonl"]
    playing += ["serve=[my_environments:Who]", "tasks=[{env_id: Who}]"]
    with running(console_script(directory, *playing)) as process:
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert "2 episodes: success 1.000" in output
    shown = [turn["observation"] for line in read_lines(directory / "played.jsonl") for turn in line["turns"]]
    assert shown == [f"process {process.pid}"] * 2


def test_a_breakpoint_in_an_environment_reaches_the_terminal(directory):
    playing = ["rollout", "--policy", "random", "--episodes", "1"]
    playing += ["serve=[Here=my_environments:Stopping]", "tasks=[{env_id: Here}]"]
    with running(console_script(directory, *playing)) as process:
        output, _ = process.communicate("p action * 3\ncontinue\n", timeout=120)
    assert process.returncode == 0, output
    assert "(Pdb) 'yesyesyes'" in output
    assert "1 episodes: success 1.000" in output


@pytest.mark.slow
def test_a_served_environment_is_trained_on_and_measured(tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text(COUNTDOWN)
    words = ["--config", str(config), f"output_dir={tmp_path}/out"]
    output = train(*words)
    assert "baseline  down/random" in output
    assert "baseline  down/blind is not played: Down has no expert" in output
    assert "baseline  lake/blind is not played: the run does not train on FrozenLake-v0" in output
    assert {line["task"]["env_id"] for line in read_lines(tmp_path / "out" / "episodes.jsonl")} == {"Down"}
    assert "policy  down/sampled" in train("eval", *words)
    assert "2 episodes: success" in train("rollout", "--episodes", "2", *words)
