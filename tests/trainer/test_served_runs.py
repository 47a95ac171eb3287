"""Runs whose policy is sampled by servers: started by the run, brought its weights, ended with it."""

import json
import os
import sys
from pathlib import Path

import pytest

from tests.support.processes import env_server, read_lines, refused, train

CONFIG = """
seed: 3
steps: 3
tasks:
  - {env_id: FrozenLake-v0, kwargs: {size: 4, split: train, max_episode_steps: 4}}
model: {hidden_size: 32, layers: 1, heads: 2, max_length: 64}
prompt: {context: single_turn, instruction: none}
rollout: {groups_per_step: 3, group_size: 2, max_turns: 4, max_new_tokens: 2, max_staleness: 1}
inference:
  kind: %s
  dtype: float32
  launch: {count: 2, command: %s}
algorithm: {preset: grpo, correction: {kind: truncate}}
evaluation:
  every: 0
  sets:
    lake: {env_id: FrozenLake-v0, kwargs: {size: 4, split: test, max_episode_steps: 4}, episodes: 4, baselines: false}
checkpoint: {every: 1}
tracking: {tensorboard: false}
"""


@pytest.fixture(scope="module")
def url():
    with env_server() as address:
        yield address


@pytest.fixture(scope="module", params=["vllm", pytest.param("sglang", marks=pytest.mark.slow)])
def kind(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def run(tmp_path_factory, url, kind) -> tuple[Path, Path, str]:
    """A finished run: its config, its directory and what it printed."""
    directory = tmp_path_factory.mktemp("served")
    config = directory / "config.yaml"
    config.write_text(CONFIG % (kind, json.dumps([sys.executable, "-m", f"tests.support.{kind}_program"])))
    output = train("--config", str(config), "--env-url", url, f"output_dir={directory}/out")
    return config, directory / "out", output


def processes_of(directory: Path) -> list[str]:
    """Command lines that name the directory, of all processes of this machine."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if any(str(directory).encode() in word for word in words):
                found.append(b" ".join(words).decode())
    return found


def test_every_update_is_verified_and_the_policy_is_the_one_that_is_trained(run):
    _, directory, output = run
    steps = [row for row in read_lines(directory / "metrics.jsonl") if "sync/probe_difference" in row]
    assert [row["step"] for row in steps] == [1, 2, 3]
    for row in steps:
        assert row["sync/probe_difference"] < 1e-3
        assert row["sync/bytes"] > 0
        assert row["mismatch/k3"] < 1e-3
    assert "answers after" in output


def test_both_servers_sample_and_say_so_in_their_logs(run, kind):
    _, directory, _ = run
    logs = sorted(file.name for file in (directory / "inference").iterdir())
    assert logs == [f"{kind}-0.log", f"{kind}-1.log"]


def test_nothing_is_left_behind(run):
    _, directory, _ = run
    assert processes_of(directory) == []
    assert [path.name for path in (directory / "weights").iterdir() if path.is_dir()] == []


def test_a_trained_policy_is_evaluated_through_servers(run, url):
    config, directory, _ = run
    output = train(
        "eval",
        "--config",
        str(config),
        "--env-url",
        url,
        f"output_dir={directory}",
        "inference.launch.count=1",
    )
    assert "policy" in output
    assert "lake/sampled" in output


def test_a_server_that_does_not_start_is_an_error_with_its_last_lines(run, url, tmp_path):
    config, _, _ = run
    code = "import sys; sys.exit('no CUDA device is here')"
    output = refused(
        *("--config", str(config), "--env-url", url, f"output_dir={tmp_path}/out"),
        f"inference.launch.command={json.dumps([sys.executable, '-c', code])}",
    )
    assert "ended with code 1" in output
    assert "no CUDA device is here" in output
