"""Environments of third parties, twenty lines each, registered over HTTP with a gateway; a policy learns from them."""

from pathlib import Path

import httpx
import pytest

from rollgym.trainer.core.run_files import read_lines
from tests.support.client_server import ServerProcess
from tests.support.foreign_servers import ForeignServer
from tests.support.processes import ROOT, train

CONFIG = """
seed: 1
steps: 13
tasks: [{env_id: Vowels}]
model: {hidden_size: 32, layers: 1, heads: 2, max_length: 128}
prompt: {instruction: none}
optimizer: {learning_rate: 5.0e-2}
rollout: {groups_per_step: 4, group_size: 16, max_turns: 1, max_new_tokens: 2}
evaluation: {every: 0}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "language", ["python, twenty lines", pytest.param("javascript, twenty lines", marks=pytest.mark.slow)]
)
def test_a_policy_learns_in_an_environment_that_was_registered_over_http(
    language: str, tmp_path: Path
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG)
    arguments = ("--gateway", "--allow-network", "loopback", "--log-level", "error")
    with ForeignServer(language) as server, ServerProcess(arguments) as gateway:
        body = {"env_id": "Vowels", "url": server.url, "protocol": "http", "ttl_s": 600}
        answer = httpx.post(f"{gateway.url}/v1/envs", json=body, timeout=60)
        assert answer.status_code == 201, answer.text
        train("--config", str(config), "--env-url", gateway.url, f"output_dir={tmp_path}/run")
    rows = read_lines(tmp_path / "run" / "metrics.jsonl")
    rewards = [row["rollout/reward"] for row in rows if "rollout/reward" in row]
    assert len(rewards) == 13
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.2, rewards


def test_the_environments_have_about_twenty_lines() -> None:
    for name in ("twenty_lines.py", "twenty_lines.mjs"):
        lines = (ROOT / "examples" / name).read_text().splitlines()
        code = [line for line in lines if line.strip() and not line.strip().startswith(('"""', "//"))]
        assert len(code) <= 20, name
