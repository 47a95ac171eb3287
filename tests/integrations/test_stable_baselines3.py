"""stable-baselines3 trains on environments of a real server: the program of docs/coming_from/gymnasium.md."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integrations.pages import blocks, run_block
from tests.support.client_server import ServerProcess
from tests.support.processes import ROOT

IN_PROCESSES = """
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import SubprocVecEnv

if __name__ == "__main__":
    remote = {"url": "URL", "env_id": "CartPole-v1"}
    envs = make_vec_env(
        "rollgym:rollgym/Remote-v0", n_envs=2, seed=0, vec_env_cls=SubprocVecEnv, env_kwargs=remote
    )
    envs.reset()
    print(envs.step([0, 1])[0].shape)
    envs.close()
"""


def test_ppo_trains_on_remote_environments(server: ServerProcess) -> None:
    pytest.importorskip(
        "stable_baselines3", reason="it is installed by .ci/peers, in an environment of its own"
    )
    import torch

    (block,) = blocks("gymnasium.md")
    trained = [run_block(block.text, server)["model"] for _ in range(2)]
    assert [model.num_timesteps for model in trained] == [1024, 1024]
    weights = [model.policy.state_dict() for model in trained]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert trained[0].ep_info_buffer, "episodes have ended, and were seen"


def test_environments_are_made_in_processes_that_start_python_anew(
    server: ServerProcess, tmp_path: Path
) -> None:
    pytest.importorskip(
        "stable_baselines3", reason="it is installed by .ci/peers, in an environment of its own"
    )
    script = tmp_path / "train.py"
    script.write_text(IN_PROCESSES.replace("URL", server.url))
    done = subprocess.run(
        [sys.executable, str(script)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "(2, 4)\n", done.stderr
