"""Ranks on this machine: one that dies is started again, and the run goes on; then it goes on in one process."""

import json
import os
import signal
from pathlib import Path

import pytest

from rollgym.trainer.cli import main
from rollgym.trainer.core.console import RunConsole
from rollgym.trainer.records.ledger import Ledger, TaskEvent

CONFIG = """
seed: 3
steps: 3
deterministic: true
tasks:
  - {env_id: FrozenLake-v0, kwargs: {size: 4, split: train, max_episode_steps: 6, format_penalty: -0.1}}
model: {hidden_size: 16, layers: 1, heads: 2, max_length: 96, device: cpu}
prompt: {context: single_turn, instruction: none}
rollout: {groups_per_step: 2, group_size: 2, max_turns: 6, max_new_tokens: 3}
evaluation: {every: 0, sets: {}}
checkpoint: {every: 1, asynchronous: true}
tracking: {tensorboard: false}
backend: {kind: fsdp2, ranks: 2}
algorithm: {preset: ppo, kl: {coefficient: 0.05, estimator: k3, placement: loss}}
cluster: {restart_after_s: 0.01, offload: true, offload_models: true}
"""


def kill_a_rank() -> None:
    """Kill the second of this process's ranks."""
    ranks = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().split(b"\0")
            variables = dict(
                each.partition(b"=")[::2] for each in (folder / "environ").read_bytes().split(b"\0")
            )
        except OSError:
            continue
        if b"rollgym.trainer.backends.rank" in command and command[-2] == str(os.getpid()).encode():
            ranks.append((variables[b"RANK"], int(folder.name)))
    os.kill(dict(ranks)[b"1"], signal.SIGKILL)


@pytest.mark.slow
def test_a_rank_that_dies_is_started_again_and_the_run_goes_on_in_one_process(tmp_path, monkeypatch, capfd):
    run, config = tmp_path / "run", tmp_path / "run.yaml"
    config.write_text(CONFIG)
    say, killed = RunConsole.say, []

    def listening(console: RunConsole, text: str) -> None:
        say(console, text)
        if "step 1:" in text and not killed:
            killed.append(text)
            kill_a_rank()

    with monkeypatch.context() as patch:
        patch.setattr(RunConsole, "say", listening)
        code = main(["--config", str(config), f"output_dir={run}"])
    printed = capfd.readouterr()
    output = " ".join((printed.out + printed.err).split())
    assert code == 0, output
    assert killed
    assert "rank 1 of 2 is gone (killed by signal 9" in output
    assert output.count("actor_train is started again in 0.01 s (1 of 3), and the run goes on from ") == 1
    words = ["checkpoint.resume=auto", "steps=4", "backend={}", "cluster={}", "threads=2"]
    assert main(["--config", str(config), f"output_dir={run}", *words]) == 0
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics if "loss/policy" in line] == [1, 2, 3, 4]
    ledger = Ledger(run / "ledger.jsonl")
    fates = [ledger.fate(task) for task in range(12)]
    ledger.close()
    assert fates[:8] == [TaskEvent.TRAINED] * 8
    assert set(fates[8:]) <= {None, TaskEvent.DROPPED}
