"""A run whose inference servers are added, taken away and killed while it goes on."""

import json
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from rollgym.trainer.models.load import save_model
from rollgym.trainer.models.tiny import TinyPolicySettings, build_tiny_model, build_tiny_tokenizer
from tests.support.inference_server.running import InferenceServerProcess
from tests.support.processes import env_server, read_lines, running, start_training

CONFIG = """
seed: 3
steps: 300
tasks:
  - {env_id: FrozenLake-v0, kwargs: {size: 4, split: train, max_episode_steps: 4}}
model: {path: %s, max_length: 64}
prompt: {context: single_turn, instruction: none}
rollout: {groups_per_step: 3, group_size: 2, max_turns: 4, max_new_tokens: 2, max_staleness: 1}
inference: {kind: vllm, dtype: float32, urls_file: %s, look_every_s: 0.1, lost_after_s: 1}
algorithm: {preset: grpo, correction: {kind: truncate}}
evaluation: {every: 0, sets: {}}
tracking: {tensorboard: false}
"""


def tiny_folder(folder: Path) -> Path:
    tokenizer = build_tiny_tokenizer()
    end = int(tokenizer.eos_token_id)
    settings = TinyPolicySettings(
        len(tokenizer), hidden_size=32, layers=1, heads=2, max_length=64, end_id=end
    )
    save_model(build_tiny_model(settings, 0), tokenizer, folder)
    return folder


class Watched:
    """A run that is told of as it speaks."""

    def __init__(self, process: subprocess.Popen[str], metrics: Path) -> None:
        assert process.stdout is not None
        self._lines: Iterator[str] = process.stdout
        self._metrics = metrics
        self.said = ""

    def until(self, condition: Callable[[], bool]) -> None:
        for line in self._lines:
            self.said += line
            if condition():
                return
        raise AssertionError(f"it ended: {self.said}")

    def says(self, text: str) -> None:
        # Long sentences are broken between words.
        self.until(lambda: text in " ".join(self.said.split()))

    def steps(self, more: int) -> None:
        """Wait until it has taken so many steps more."""
        goal = self._taken() + more
        self.until(lambda: self._taken() >= goal)

    def _taken(self) -> int:
        return len(self._metrics.read_text().splitlines()) if self._metrics.exists() else 0


def finished(server: InferenceServerProcess) -> int:
    return int(server.state()["finished"])


@pytest.mark.slow
def test_a_run_goes_on_while_servers_are_added_taken_away_and_killed(tmp_path):
    folder, listed = tiny_folder(tmp_path / "model"), tmp_path / "servers"
    words = ["--model", str(folder), "--logprobs-mode", "processed_logprobs"]
    with ExitStack() as stack:
        first, second, third = (stack.enter_context(InferenceServerProcess("vllm", *words)) for _ in range(3))

        def name(*servers: InferenceServerProcess) -> None:
            scratch = tmp_path / "servers.new"
            scratch.write_text("".join(f"{server.url}\n" for server in servers))
            scratch.rename(listed)

        name(first, second)
        config = tmp_path / "config.yaml"
        config.write_text(CONFIG % (json.dumps(str(folder)), json.dumps(str(listed))))
        url = stack.enter_context(env_server())
        out = tmp_path / "out"
        process = stack.enter_context(
            running(start_training("--config", str(config), "--env-url", url, f"output_dir={out}"))
        )
        run = Watched(process, out / "metrics.jsonl")
        run.steps(1)
        assert finished(third) == 0

        name(first, second, third)
        run.says(f"inference server {third.url} takes requests, with the weights of version")
        run.steps(2)
        assert finished(third) > 1, "more than its probe"

        name(second, third)
        run.says(f"inference server {first.url} is named no more")
        quiet = finished(first)
        run.steps(2)
        assert finished(first) <= quiet + 6, "it ended what it had, and was asked no more"
        quiet = finished(first)

        third.kill()
        run.says(f"inference server {third.url} is gone")
        run.steps(2)
        assert finished(first) == quiet
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=120)
    assert "Traceback" not in run.said + said
    steps = [row for row in read_lines(out / "metrics.jsonl") if "sync/probe_difference" in row]
    assert [row["step"] for row in steps] == list(range(1, len(steps) + 1))
    assert len(steps) >= 7
    assert max(row["sync/probe_difference"] for row in steps) < 1e-3
