"""stable-baselines3 trains on environments of a real server: the program of docs/coming_from/gymnasium.md."""

import pytest

from tests.integrations.pages import blocks, run_block
from tests.support.client_server import ServerProcess


def test_ppo_trains_on_remote_environments(server: ServerProcess) -> None:
    pytest.importorskip(
        "stable_baselines3", reason="it is installed by .ci/peers, in an environment of its own"
    )
    (block,) = blocks("gymnasium.md")
    text = block.text.replace("model.learn(1024)", "model.learn(512)")
    assert text != block.text
    names = run_block(text, server)
    assert names["model"].num_timesteps == 512
