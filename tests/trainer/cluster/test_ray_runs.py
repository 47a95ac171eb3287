"""A run whose roles are actors of a Ray cluster: it learns what a run in one process learns, and outlives its actors.

One run has every kind of its processes killed once, each after another step.
"""

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from trainer.cli import main
from trainer.core.console import RunConsole
from trainer.records.ledger import Fate, Ledger

pytest.importorskip("ray")

from ray.cluster_utils import Cluster

STEPS, GROUPS = 5, 2
CONFIG = f"""
seed: 3
steps: {STEPS}
deterministic: true
tasks:
  - {{env_id: FrozenLake-v0, kwargs: {{size: 4, split: train, max_episode_steps: 6, format_penalty: -0.1}}}}
model: {{hidden_size: 16, layers: 1, heads: 2, max_length: 96, device: cpu}}
prompt: {{context: single_turn, instruction: none}}
algorithm: ppo
rollout: {{groups_per_step: {GROUPS}, group_size: 4, max_turns: 6, max_new_tokens: 3}}
evaluation: {{every: 0, panels: {{}}}}
checkpoint: {{every: 1, asynchronous: true}}
tracking: {{tensorboard: false}}
backend: {{kind: fsdp2, ranks: 2}}
cluster:
  kind: ray
  restart_after_s: 0.01
  roles: {{actor_inference: {{devices: 2}}, environment: {{actors: 1}}}}
"""
COMPARED = ("loss/policy", "loss/critic", "critic/squared_error", "rollout/reward", "policy/gradient_norm")
_PROCESS = re.compile(r"^process (\d+) on ", re.MULTILINE)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head with room for all roles."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_MODE", "disabled")
        running = Cluster(initialize_head=True, head_node_args={"num_cpus": 6})
        yield running
        running.shutdown()


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG)
    return path


def metrics_of(run: Path) -> list[dict]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss/policy" in line]


def kill_role(run: Path, name: str) -> None:
    """Kill the process of a role that wrote to its log last."""
    said = _PROCESS.findall((run / "ranks" / f"{name}.log").read_text())
    os.kill(int(said[-1]), signal.SIGKILL)


def kill_titled(title: bytes) -> None:
    """Kill the one process whose command line begins so; its children, which may be called the same, end with it."""
    found: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (folder / "cmdline").read_bytes().startswith(title):
                parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
                found[int(folder.name)] = int(parent)
        except OSError:
            continue
    (process,) = [each for each, parent in found.items() if parent not in found]
    os.kill(process, signal.SIGKILL)


def test_a_run_on_ray_outlives_each_of_its_actors_and_learns_what_one_process_learns(
    cluster, config, tmp_path, monkeypatch, capfd
):
    run, alone = tmp_path / "run", tmp_path / "alone"
    kills: dict[str, Callable[[], None]] = {
        "step 1:": lambda: kill_role(run, "actor_train_1"),
        "step 2:": lambda: kill_titled(b"ray::Host"),
        "step 3:": lambda: kill_role(run, "actor_inference_0"),
    }
    say = RunConsole.say
    breakpoints: set[str | None] = set()

    def listening(console: RunConsole, text: str) -> None:
        say(console, text)
        breakpoints.add(os.environ.get("PYTHONBREAKPOINT"))
        for at in [at for at in kills if at in text]:
            kills.pop(at)()

    with monkeypatch.context() as patch:
        patch.setattr(RunConsole, "say", listening)
        patch.delenv("PYTHONBREAKPOINT", raising=False)
        code = main(["--config", str(config), f"output_dir={run}", f"cluster.address={cluster.address}"])
    printed = capfd.readouterr()
    output = " ".join((printed.out + printed.err).split())
    assert code == 0, output
    assert not kills, "every kind was killed"
    assert breakpoints == {None}, (
        "an environment in this process stops at the terminal, not in Ray's debugger"
    )
    assert output.count("its roles are started again") == 2, output
    for role in ("process 1 of actor_train is gone", "process 0 of actor_inference is gone"):
        assert role in output
    assert main(["--config", str(config), f"output_dir={alone}", "backend={}", "cluster={}"]) == 0
    afar, here = metrics_of(run), metrics_of(alone)
    assert [line["step"] for line in afar] == [line["step"] for line in here] == list(range(1, STEPS + 1))
    for one, other in zip(afar, here, strict=True):
        for name in COMPARED:
            assert one[name] == pytest.approx(other[name], abs=1e-4), (one["step"], name)
    assert any(abs(line["critic/squared_error"]) > 1e-3 for line in here)
    ledger = Ledger(run / "ledger.jsonl")
    fates = [ledger.fate(task) for task in range(GROUPS * STEPS + 8)]
    ledger.close()
    assert fates[: GROUPS * STEPS] == [Fate.TRAINED] * (GROUPS * STEPS)
    assert set(fates[GROUPS * STEPS :]) <= {None, Fate.DROPPED}
