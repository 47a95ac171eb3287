"""`roll-train`, its other commands, and everything that a config may replace."""

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from rollgym.env_server.access.tokens import add_token
from tests.support.processes import ROOT, env_server, read_lines, refused, running, start_training, train

CONFIG = """
seed: 3
steps: 1
tasks:
  - {env_id: FrozenLake-v0, kwargs: {size: 4, split: train, max_episode_steps: 8}, domain: lake}
  - {env_id: Sokoban-v0, kwargs: {max_episode_steps: 5}, domain: boxes}
model: {hidden_size: 32, layers: 1, heads: 2, max_length: 512}
prompt: {context: full_history, instruction: none}
warm_start: {demonstrations: 20, epochs: 3, learning_rate: 5.0e-3}
rollout: {groups_per_step: 8, group_size: 2, max_turns: 8, max_new_tokens: 3}
evaluation:
  every: 0
  sets:
    lake: {env_id: FrozenLake-v0, kwargs: {size: 4, split: test, max_episode_steps: 5}, episodes: 8}
    never_trained: {env_id: Arithmetic-v0, episodes: 6, baselines: false}
tracking: {tensorboard: true}
"""


@pytest.fixture(scope="module")
def url():
    with env_server("--allow-expert") as address:
        yield address


@pytest.fixture(scope="module")
def run(tmp_path_factory, url) -> tuple[Path, Path, str]:
    """A finished run: its config, its directory and what it printed."""
    directory = tmp_path_factory.mktemp("run")
    config = directory / "config.yaml"
    config.write_text(CONFIG)
    output = train("--config", str(config), "--env-url", url, f"output_dir={directory}/out")
    return config, directory / "out", output


def roll_train(command: str, run, url, *arguments: str) -> str:
    config, directory, _ = run
    return train(command, "--config", str(config), "--env-url", url, f"output_dir={directory}", *arguments)


def test_a_mixed_run_reports_by_domain_and_evaluation_set(run):
    _, directory, output = run
    rows = read_lines(directory / "metrics.jsonl")
    keys = {key for row in rows for key in row}
    assert {"domain/lake/success", "domain/boxes/reward", "policy/entropy", "rollout/lag_max"} <= keys
    for player in ("sampled", "greedy", "random", "blind"):
        assert f"evaluate/lake/{player}/success" in keys
    assert "evaluate/never_trained/sampled/success" in keys
    assert "evaluate/never_trained/random/success" not in keys
    assert "gain" in output
    assert list((directory / "tensorboard").glob("events*"))
    domains = {line["task"]["domain"] for line in read_lines(directory / "episodes.jsonl")}
    assert domains <= {"lake", "boxes"}


def test_episodes_hold_text_and_ids(run):
    _, directory, _ = run
    for episode in read_lines(directory / "episodes.jsonl"):
        for turn in episode["turns"]:
            segment, start, end = turn["tokens"]
            masks = episode["segments"][segment]["action_mask"]
            assert all(masks[start:end])
        assert sum(sum(segment["action_mask"]) for segment in episode["segments"]) == sum(
            turn["tokens"][2] - turn["tokens"][1] for turn in episode["turns"]
        )


@pytest.mark.parametrize("player", ["model", "random"])
def test_rollout_plays_without_training(run, url, player, tmp_path):
    file = tmp_path / "episodes.jsonl"
    output = roll_train(
        "rollout",
        run,
        url,
        *("--policy", player, "--episodes", "3", "--evaluation-set", "lake", "--output", str(file)),
    )
    assert "3 episodes: success" in output
    assert len(read_lines(file)) == 3


def test_a_recorded_episode_plays_again_exactly(run, url, tmp_path):
    recorded, again = tmp_path / "recorded.jsonl", tmp_path / "again.jsonl"
    roll_train("rollout", run, url, "--policy", "model", "--episodes", "2", "--output", str(recorded))
    roll_train(
        "rollout", run, url, "--policy", "recorded", "--recorded", str(recorded), "--output", str(again)
    )
    for first, second in zip(read_lines(recorded), read_lines(again), strict=True):
        for turn, other in zip(first["turns"], second["turns"], strict=True):
            assert (turn["observation"], turn["reply"], turn["reward"]) == (
                other["observation"],
                other["reply"],
                other["reward"],
            )


def test_a_person_plays_in_the_terminal(run, url):
    config, directory, _ = run
    words = ["rollout", "--config", str(config), "--env-url", url, f"output_dir={directory}"]
    result = subprocess.run(
        [
            sys.executable,
            "-m",
            "rollgym.trainer.cli",
            *words,
            "--policy",
            "human",
            "--episodes",
            "1",
            "--evaluation-set",
            "lake",
        ],
        input="Right\n" * 8,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "reply (Left, Down, Right, Up)>" in result.stdout
    first = result.stdout.index("reply (Left")
    assert "You" in result.stdout[:first], "the instruction comes first"


def test_eval_measures_the_trained_policy(run, url):
    output = roll_train("eval", run, url)
    assert "policy  lake/sampled" in output
    assert "baseline  lake/random" in output


def test_everything_replaceable_is_replaced(run, url, tmp_path):
    config, _, _ = run
    train(
        "--config",
        str(config),
        "--env-url",
        url,
        f"output_dir={tmp_path}/out",
        "evaluation.sets={}",
        "rollout.agent=tests.support.plugins:two_turn_agent",
        "rollout.reward=tests.support.plugins:pay_valid_replies",
        "rollout.task_source=tests.support.plugins:EvenSeeds",
        "prompt.custom_context=tests.support.plugins:forgetful",
    )
    episodes = read_lines(tmp_path / "out" / "episodes.jsonl")
    assert len(episodes) == 16
    for episode in episodes:
        assert episode["task"]["domain"] == "even"
        assert episode["task"]["seed"] % 2 == 0
        assert len(episode["turns"]) <= 2
        assert episode["reward"] == sum(turn["valid"] for turn in episode["turns"])


def test_a_task_source_needs_no_tasks_and_no_server(run, tmp_path):
    config, _, _ = run
    output = train(
        *("--config", str(config), f"output_dir={tmp_path}/out", "tasks=[]", "warm_start=null"),
        "rollout.task_source=tests.support.plugins:LakesOnly",
        *("evaluation.sets.never_trained.episodes=2", "evaluation.sampled=false"),
    )
    assert "started an embedded environment server" in output
    assert {line["task"]["env_id"] for line in read_lines(tmp_path / "out" / "episodes.jsonl")} == {
        "FrozenLake-v0"
    }
    # It is what the run trains on, and needs no warm start to be shown.
    assert "baseline  lake/blind  " in output


def test_a_server_that_gives_no_expert_actions_costs_the_blind_baseline_only(run):
    with env_server() as url:
        output = roll_train("eval", run, url)
    assert "baseline  lake/random" in output
    assert "baseline  lake/blind is not played: the server gives no expert actions" in output
    assert "policy  lake/sampled" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--env-url", "http://127.0.0.1:9"], "127.0.0.1:9"),
        (["tasks.0.env_id=FrozenLake-v7"], "FrozenLake-v7"),
        (["rollout.reward=no.such:thing"], "cannot import 'no.such'"),
        (["checkpoint.resume=/no/such/folder"], "nor a checkpoint's folder"),
        (["model={path: /no/such/model}"], "model.path: there is no folder"),
    ],
)
def test_mistakes_end_with_one_readable_line(run, url, arguments, message, tmp_path):
    config, _, _ = run
    given = arguments if "--env-url" in arguments else ["--env-url", url, *arguments]
    output = refused("--config", str(config), f"output_dir={tmp_path}/out", *given)
    assert message in output.splitlines()[-1]


def test_a_killed_run_leaves_no_server_behind(tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG)
    with running(start_training("--config", str(config), f"output_dir={tmp_path}/out")) as process:
        assert process.stdout is not None
        found = (re.search(r"http://([\d.]+):(\d+)", line) for line in process.stdout)
        address = next(match for match in found if match)
        process.kill()
        # The server holds the other end of this pipe, too: it ends only when both have ended.
        process.communicate(timeout=60)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((address[1], int(address[2])))


def test_the_token_may_stand_in_the_environment_and_is_not_saved(tmp_path, monkeypatch):
    token = add_token(tmp_path / "tokens.yaml", "trainer", ["play"])
    with env_server("--token-file", str(tmp_path / "tokens.yaml")) as url:
        play = ["rollout", "--policy", "random", "--episodes", "1", "--env-url", url]
        play += ["tasks=[{env_id: FrozenLake-v0}]", f"output_dir={tmp_path}/run"]
        assert "this server needs a token" in refused(*play)
        monkeypatch.setenv("ROLLGYM_TOKEN", token)
        train(*play)
    assert not any(token.encode() in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
