"""A run whose roles are actors on two nodes: it learns what a run in one process learns, and outlives its actors.

It has every kind of its processes killed once, each after another step.
"""

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from rollgym.trainer.cli import main
from rollgym.trainer.core.console import RunConsole
from rollgym.trainer.records.ledger import Ledger, TaskEvent
from tests.support.processes import descendants

pytestmark = pytest.mark.slow

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
evaluation: {{every: 0, sets: {{}}}}
checkpoint: {{every: 1, asynchronous: true}}
tracking: {{tensorboard: false}}
backend: {{kind: fsdp2, ranks: 2}}
cluster:
  kind: ray
  nodes: 2
  devices_per_node: 4
  restart_after_s: 0.01
  roles: {{actor_train: {{devices: [0, 4]}}, actor_inference: {{devices: 5}}, environment: {{actors: 1}}}}
"""
COMPARED = ("loss/policy", "loss/critic", "critic/squared_error", "rollout/reward", "policy/gradient_norm")
_PROCESS = re.compile(r"^process (\d+) on ", re.MULTILINE)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG)
    return path


def metrics_of(run: Path) -> list[dict]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss/policy" in line]


def processes_of(run: Path, name: str) -> list[int]:
    """The processes that a role has had, one after the other."""
    return [int(pid) for pid in _PROCESS.findall((run / "ranks" / f"{name}.log").read_text())]


def raylet_of(process: int) -> str:
    """The daemon of the node that has started an actor."""
    return next(
        line
        for line in Path(f"/proc/{process}/environ").read_text().split("\0")
        if line.startswith("RAY_RAYLET_PID=")
    )


def kill_environment_worker() -> None:
    """Kill the actor that environments run in: of those below this process the nearest, whose children end with it."""
    worker = next(pid for pid, command in descendants(os.getpid()) if command.startswith(b"ray::ActorHost"))
    os.kill(worker, signal.SIGKILL)


def test_a_run_on_ray_outlives_each_of_its_actors_and_learns_what_one_process_learns(
    ray_cluster, config, tmp_path, monkeypatch, capfd
):
    run, alone = tmp_path / "run", tmp_path / "alone"
    engines: list[list[int]] = []

    def kill(name: str) -> None:
        os.kill(processes_of(run, name)[-1], signal.SIGKILL)

    def kill_the_engine() -> None:
        engines.append(processes_of(run, "actor_inference_0"))
        kill("actor_inference_0")

    kills: dict[str, Callable[[], None]] = {
        "step 1: success": lambda: kill("actor_train_1"),
        "step 2: success": kill_environment_worker,
        "step 3: success": kill_the_engine,
    }
    say = RunConsole.say
    breakpoints: set[str | None] = set()
    places: list[list[str]] = []

    def listening(console: RunConsole, text: str) -> None:
        say(console, text)
        breakpoints.add(os.environ.get("PYTHONBREAKPOINT"))
        if "step 1: success" in text:
            roles = ("actor_train_0", "actor_train_1", "actor_inference_0")
            places.append([raylet_of(processes_of(run, role)[-1]) for role in roles])
        for at in [at for at in kills if at in text]:
            kills.pop(at)()

    with monkeypatch.context() as patch:
        patch.setattr(RunConsole, "say", listening)
        patch.delenv("PYTHONBREAKPOINT", raising=False)
        words = ["--config", str(config), f"output_dir={run}", f"cluster.address={ray_cluster.address}"]
        code = main(words)
    printed = capfd.readouterr()
    output = " ".join((printed.out + printed.err).split())
    assert code == 0, output
    assert not kills, "every kind was killed"
    assert all(first != second == engine for first, second, engine in places), (
        "ranks on two nodes, the second with the engine"
    )
    assert places
    assert breakpoints == {None}, (
        "an environment in this process stops at the terminal, not in Ray's debugger"
    )
    # Where a rank died, its group goes back to the checkpoint; all others stay, and an engine comes back in its place.
    assert output.count("actor_train is started again in 0.01 s (1 of 3), and the run goes on from") == 1, (
        output
    )
    assert output.count("the run goes on from") == 1, output
    assert output.count("actor_inference is back") == 1, output
    for role in (
        "process 1 of actor_train on node 127.0.0.",
        "process 0 of actor_inference on node 127.0.0.",
    ):
        assert f"{role}" in output
    assert [len(before) for before in engines] == [1], "the engine outlived the rank"
    assert [len(processes_of(run, f"actor_train_{rank}")) for rank in (0, 1)] == [2, 2]
    assert len(processes_of(run, "actor_inference_0")) == 2
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
    assert fates[: GROUPS * STEPS] == [TaskEvent.TRAINED] * (GROUPS * STEPS)
    assert set(fates[GROUPS * STEPS :]) <= {None, TaskEvent.DROPPED}
