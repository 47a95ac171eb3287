"""Environments with Gymnasium's own `Text` space, registered under a Gymnasium id by a module of their author's."""

from pathlib import Path

import pytest

from rollgym.trainer.cli import main
from tests.support.processes import env_server, read_lines

MODULE = '''
import gymnasium
from gymnasium.spaces import Text


class Echo(gymnasium.Env):
    """Pays for replies with an a in them. Its alphabet is small; a model's is not."""

    def __init__(self):
        self.action_space = Text(max_length=3, charset="abc")
        self.observation_space = Text(max_length=60)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "say a", {}

    def step(self, action):
        assert isinstance(action, str)
        return "over", float("a" in action), True, False, {"success": "a" in action}


gymnasium.register("Echo-v0", entry_point=Echo)
'''


def test_a_language_model_plays_what_takes_gymnasiums_text(tmp_path: Path, monkeypatch, capfd) -> None:
    (tmp_path / "author_of_echo.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    file = tmp_path / "episodes.jsonl"
    words = ["tasks=[{env_id: Echo-v0}]", "model={hidden_size: 16, layers: 1, heads: 2, max_length: 64}"]
    words += [
        "rollout={groups_per_step: 1, group_size: 2, max_new_tokens: 8}",
        f"output_dir={tmp_path}/run",
        "steps=1",
    ]
    words += ["tracking.tensorboard=false"]
    with env_server("--gymnasium", "author_of_echo:Echo-v0") as url:
        assert main(["--env-url", url, *words]) == 0, capfd.readouterr().err
        rollout = [
            "rollout",
            "--policy",
            "random",
            "--episodes",
            "2",
            "--output",
            str(file),
            "--env-url",
            url,
        ]
        assert main([*rollout, *words]) == 0
    episodes = read_lines(tmp_path / "run" / "episodes.jsonl")
    assert {episode["outcome"] for episode in episodes} <= {"solved", "failed"}
    assert all(set(turn["reply"]) <= set("abc") for episode in read_lines(file) for turn in episode["turns"])


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ("no_such_module_here:Echo-v0", "ModuleNotFoundError: No module named 'no_such_module_here'"),
        ("json:Echo-v9", "doesn't exist"),
        ("broken_author:Echo-v0", "ZeroDivisionError: division by zero"),
    ],
)
def test_a_module_that_registers_nothing_is_named(tmp_path, monkeypatch, named, message):
    from rollgym.env_server.catalog.catalog import Catalog, ConfigurationError
    from rollgym.env_server.common.settings import ServerSettings

    (tmp_path / "broken_author.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigurationError, match="cannot serve the Gymnasium environment") as refused:
        Catalog.load(ServerSettings(gymnasium=(named,), builtin=False))
    assert message in str(refused.value)
