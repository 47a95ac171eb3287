"""Asynchronous runs whose trainer or inference server is killed in mid-turn: every token is accounted for."""

import json
import sys
import time
from pathlib import Path

import pytest

from tests.support.processes import env_server, kill_module
from tests.support.server_accounts import server_account_of
from tests.support.token_accounts import account_of
from tests.support.training_forks import TrainingForks

CONFIG = """
seed: 5
steps: 3
tasks:
  - {env_id: FrozenLake-v0, kwargs: {size: 4, split: train, max_episode_steps: 8, format_penalty: -0.1}}
model: {hidden_size: 16, layers: 1, heads: 2, max_length: 256}
prompt: {instruction: none}
rollout: {groups_per_step: 2, group_size: 2, max_turns: 8, max_new_tokens: 3, max_staleness: 1}
evaluation: {every: 0, sets: {}}
checkpoint: {every: 1, resume: auto}
tracking: {tensorboard: false, digests: true}
"""
PATIENCE_S = 120.0


def logged(run: Path) -> int:
    return sum(path.stat().st_size for path in run.glob("rollout_log/*.log"))


def kill_in_mid_turn(forks: TrainingForks, trainer: int, run: Path, grown_by: int, output: Path) -> None:
    """Kill a trainer once its rollout log has grown by so many bytes."""
    begun, until = logged(run), time.monotonic() + PATIENCE_S
    while logged(run) < begun + grown_by:
        assert forks.ended(trainer) is None, f"ended before it was killed:\n{output.read_text()}"
        assert time.monotonic() < until
        time.sleep(0.002)
    forks.kill(trainer)
    assert forks.wait(trainer, PATIENCE_S) < 0


@pytest.mark.slow
def test_no_token_is_lost_or_drawn_twice(tmp_path):
    config, run, beside, output = (tmp_path / name for name in ("run.yaml", "run", "beside", "output"))
    config.write_text(CONFIG)
    with env_server() as url, TrainingForks() as forks:
        arguments = ["--config", str(config), "--env-url", url, f"output_dir={run}"]
        for grown_by in (1, 3000, 9000):
            kill_in_mid_turn(forks, forks.start(arguments, output, beside), run, grown_by, output)
        last = forks.start(arguments, output, beside)
        assert forks.wait(last, PATIENCE_S) == 0, output.read_text()
        account = account_of(run, beside, steps=3, groups_per_step=2)
        assert (account.faults, account.lost, account.drawn_twice) == ([], 0, 0)
        assert account.consumed > 0
        assert account.drawn == account.logged + account.in_flight
        assert "are not sampled again" in output.read_text()
        deterministic(forks, arguments, tmp_path)


@pytest.mark.slow
def test_no_token_of_a_server_is_lost_or_drawn_twice(tmp_path):
    """It is started again by the run's keeper, and brought the weights that replies under way go on with."""
    config, run, beside, output = (tmp_path / name for name in ("run.yaml", "run", "beside", "output"))
    program, log = [sys.executable, "-m", "tests.support.vllm_program"], beside / "server-0.jsonl"
    launch = {"command": program, "environment": {"ROLLGYM_DOUBLE_LOG": str(log)}}
    inference = {"kind": "vllm", "dtype": "float32", "look_every_s": 0.2, "launch": launch}
    config.write_text(
        f"{CONFIG}algorithm: {{correction: {{kind: truncate}}}}\ninference: {json.dumps(inference)}\n"
    )
    beside.mkdir()
    kills = []
    with env_server() as url, TrainingForks() as forks:
        arguments = ["--config", str(config), "--env-url", url, f"output_dir={run}", "tracking.digests=false"]
        kill_in_mid_turn(forks, forks.start(arguments, output, beside), run, 1, output)
        kills.append(time.time())
        last = forks.start(arguments, output, beside)
        until_grown(log, forks, last, output)
        kills.append(time.time())
        assert kill_module(program[-1], run)
        assert forks.wait(last, PATIENCE_S) == 0, output.read_text()
    account = account_of(run, beside, steps=3, groups_per_step=2)
    assert (account.faults, account.lost, account.drawn_twice) == ([], 0, 0)
    servers = server_account_of([log], beside, kills, time.time())
    assert (servers.faults, servers.thrown_away) == ([], 0)
    assert servers.given == account.drawn > 0
    assert servers.drawn == servers.given + servers.cut_off_by_a_kill + servers.under_way_at_the_end


def until_grown(log: Path, forks: TrainingForks, trainer: int, output: Path) -> None:
    """Wait until a server has drawn more than it had."""
    begun, until = log.stat().st_size, time.monotonic() + PATIENCE_S
    while log.stat().st_size == begun:
        assert forks.ended(trainer) is None, f"ended before its server was killed:\n{output.read_text()}"
        assert time.monotonic() < until
        time.sleep(0.002)


def deterministic(forks: TrainingForks, arguments: list[str], tmp_path: Path) -> None:
    """With one update after the other, digests are the same with a log, without one, and killed in mid-turn."""
    output, digests = tmp_path / "output", {}
    common = [*arguments[:-1], "deterministic=true", "rollout.max_staleness=0", "checkpoint.every=2"]
    for name, setting in (("without", "none"), ("killed", "machine")):
        run, beside = tmp_path / name, tmp_path / f"{name}.beside"
        words = [*common, f"output_dir={run}", f"rollout.log={setting}"]
        if name == "killed":
            for grown_by in (2000, 6000):
                kill_in_mid_turn(forks, forks.start(words, output, beside), run, grown_by, output)
        assert forks.wait(forks.start(words, output, beside), PATIENCE_S) == 0, output.read_text()
        digests[name] = [json.loads(line) for line in (run / "digests.jsonl").read_text().splitlines()]
        assert (run / "rollout_log").exists() is (name == "killed")
    assert len(digests["without"]) == 3
    assert digests["killed"] == digests["without"]
