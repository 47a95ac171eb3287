"""Plays one run in one process and on a Ray cluster, kills each kind of its actors once, and compares the three.

    nice python benchmarks/cluster/frozen_lake.py --out benchmarks/results/cluster.json

The policy, the maps, the warm start and the algorithm are those of examples/frozen_lake.yaml, with fewer steps and
groups unless `--steps 80 --groups 64` ask for all of them; on the cluster two ranks train, an engine of its own
samples, and environments are in workers. Compared are the losses of the first five steps and the success on held-out
maps in the end.

A third run has every role that there is: a critic and a reference on devices of their own, and a judge beside the maps.
Each kind of its processes is killed with SIGKILL once. It must end by itself, with every step once in its metrics and
every task once in its ledger; the same settings in one process say what its first losses are.

Everything stays in the work folder, and a run that has ended is not played again: started once more with the same
`--work`, the script goes on.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from rollgym.trainer.records.ledger import Ledger, TaskEvent  # noqa: E402
from tests.support.processes import descendants  # noqa: E402

COMPARED = 5
"""Steps whose losses are compared."""
LOSSES = ("loss/policy", "loss/kl", "loss/critic", "policy/gradient_norm")
HERE = ("cluster={}", "backend={}")
RAY = ("cluster.kind=ray", "backend={kind: fsdp2, ranks: 2}", "cluster.roles.environment={actors: 1}")
SAMPLES = "cluster.roles.actor_inference.devices=2"
PATIENCE_S = 3600.0
EVERY_ROLE = """
seed: 11
deterministic: true
tasks:
  - {env_id: FrozenLake-v0, kwargs: {size: 4, split: train, max_episode_steps: 12, format_penalty: -0.1}, weight: 3}
  - {env_id: Judged}
model: {hidden_size: 32, layers: 1, heads: 2, max_length: 384, device: cpu}
prompt: {context: single_turn, instruction: none}
algorithm: {preset: ppo, kl: {coefficient: 0.05, estimator: k3, placement: loss}}
rollout: {groups_per_step: 4, group_size: 4, max_turns: 12, max_new_tokens: 3}
evaluation: {every: 0, sets: {}}
checkpoint: {every: 2, asynchronous: true}
tracking: {tensorboard: false}
"""
GROUPS = 4
OWN_DEVICES = (SAMPLES, "cluster.roles.critic.devices=3-4", "cluster.roles.reference.devices=5-6")
KINDS = ("actor_train_1", "actor_inference_0", "environment", "judge", "critic_0", "reference_1")
_PROCESS = re.compile(r"^process (\d+) on ", re.MULTILINE)


def main() -> int:
    """Play what is not played yet, and compare."""
    options = _options()
    options.work.mkdir(parents=True, exist_ok=True)
    alike = _alike(options)
    killed = _killed(options)
    command = f"python benchmarks/cluster/frozen_lake.py --steps {options.steps} --groups {options.groups}"
    report = {"command": command, "alike": alike, "killed": killed}
    print(json.dumps(report, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if alike["holds"] and killed["holds"] else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=24, help="of the learning runs")
    parser.add_argument("--groups", type=int, default=32, help="of each of their steps, four episodes each")
    parser.add_argument("--killed-steps", type=int, default=21, help="of the run with kills")
    parser.add_argument("--work", type=Path, default=Path("runs/cluster"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.work = options.work.absolute()
    return options


# -- one process and a cluster -----------------------------------------------------------------------------------


def _alike(options: argparse.Namespace) -> dict[str, Any]:
    """Play the run in one process and on Ray, and compare losses and success."""
    words = ["--config", "examples/frozen_lake.yaml", f"steps={options.steps}", "evaluation.every=0"]
    words += [f"rollout.groups_per_step={options.groups}"]
    runs = {"one process": [*words, *HERE], "ray": [*words, *RAY, SAMPLES]}
    played = {name: _played(options.work / name.replace(" ", "_"), each) for name, each in runs.items()}
    here, afar = (_metrics(options.work / name.replace(" ", "_")) for name in runs)
    success = {name: _success(options.work / name.replace(" ", "_")) for name in runs}
    apart = _apart(here, afar)
    one, other = success.values()
    overlap = {
        name: one[name]["low"] <= other[name]["high"] and other[name]["low"] <= one[name]["high"]
        for name in one
    }
    return {
        "steps": options.steps,
        "episodes_per_step": 4 * options.groups,
        "seconds": played,
        "losses": {name: [line["loss/policy"] for line in each[:COMPARED]] for name, each in
                   (("one process", here), ("ray", afar))},
        "largest_difference": apart,
        "episodes_apart": _episodes_apart(*(options.work / name.replace(" ", "_") for name in runs)),
        "success": success,
        "overlap": overlap,
        "holds": all(overlap.values()) and max(apart.values()) <= 1e-4 and len(here) == len(afar) == options.steps,
    }  # fmt: skip


def _apart(one: Sequence[dict[str, float]], other: Sequence[dict[str, float]]) -> dict[str, float]:
    """The largest difference of each loss over the first steps."""
    return {
        name: max(abs(a[name] - b[name]) for a, b in zip(one[:COMPARED], other[:COMPARED], strict=True))
        for name in LOSSES
        if name in one[0]
    }


def _episodes_apart(one: Path, other: Path) -> list[int]:
    """How many episodes of each of the first steps said something else: where the two draw one token otherwise.

    Weights differ in their last digits, and a draw falls just beside the border between two tokens now and then; from
    there on the two runs are two samples of one experiment.
    """
    said = [_replies(one), _replies(other)]
    return [
        sum(said[0][episode] != said[1].get(episode) for episode in said[0] if episode[0] == step)
        for step in range(COMPARED)
    ]


def _replies(run: Path) -> dict[tuple[int, int, int], list[str]]:
    """What was said in the episodes of the first steps, by step, task and member."""
    replies = {}
    with (run / "episodes.jsonl").open() as lines:
        for line in lines:
            episode = json.loads(line)
            if episode["step"] >= COMPARED:
                break
            place = (episode["step"], episode["task"]["index"], episode["member"])
            replies[place] = [turn["reply"] for turn in episode["turns"]]
    return replies


def _success(run: Path) -> dict[str, dict[str, float]]:
    """Success on the held-out maps in the end, sampled and greedy, with its interval."""
    last = _lines(run)[-1]
    names = sorted(key.rpartition("/")[0] for key in last if key.endswith("/success_low"))
    return {
        name: {"rate": last[f"{name}/success"]}
        | {end: last[f"{name}/success_{end}"] for end in ("low", "high")}
        for name in names
    }


# -- kills -------------------------------------------------------------------------------------------------------


def _killed(options: argparse.Namespace) -> dict[str, Any]:
    """Play the run with every role, kill each kind of process once, and account for steps and tasks."""
    config = options.work / "every_role.yaml"
    config.write_text(EVERY_ROLE)
    judge = [sys.executable, "-m", "tests.support.judge_program", "{host}", "{port}"]
    words = ["--config", str(config), f"steps={options.killed_steps}"]
    words += [f"cluster.roles.judges.Judged={{devices: 7, model: double, command: {json.dumps(judge)}}}"]
    alone, run = options.work / "every_role_alone", options.work / "every_role"
    local = [*words, "backend={}", "cluster.kind=local"]
    _played(alone, local)
    kills = options.work / "every_role.kills.jsonl"
    seconds = _played(
        run, [*words, *RAY, *OWN_DEVICES, "cluster.restart_after_s=0.1"], kills, options.killed_steps
    )
    done = [json.loads(line) for line in kills.read_text().splitlines()]
    steps = [line["step"] for line in _metrics(run)]
    ledger = Ledger(run / "ledger.jsonl")
    fates = [ledger.fate(task) for task in range(GROUPS * options.killed_steps)]
    counts = ledger.counts()
    ledger.close()
    lost = [task for task, fate in enumerate(fates) if fate not in (TaskEvent.TRAINED, TaskEvent.DROPPED)]
    said = (run.parent / f"{run.name}.output").read_text()
    apart = _apart(_metrics(alone), _metrics(run))
    return {
        "kills": done,
        "restarts": said.count("is started again") + said.count("are started again"),
        "began_again_from_a_checkpoint": said.count("goes on from"),
        "seconds": seconds,
        "steps": len(steps),
        "ledger": counts,
        "lost": lost,
        "largest_difference": apart,
        "holds": {kill["kind"] for kill in done} == set(KINDS)
        and steps == list(range(1, options.killed_steps + 1))
        and not lost
        and max(apart.values()) <= 1e-4,
    }


def _played(run: Path, words: Sequence[str], kills: Path | None = None, steps: int = 0) -> float:
    """Play a run to its end, or go on with it; returns how many seconds it took in all."""
    done = run.parent / f"{run.name}.done"
    if done.exists():
        return float(done.read_text())
    began = time.time()
    command = [
        sys.executable,
        "-m",
        "rollgym.trainer.cli",
        *words,
        f"output_dir={run}",
        "checkpoint.resume=auto",
    ]
    with (run.parent / f"{run.name}.output").open("ab") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        try:
            if kills is not None:
                _kill_each_kind(process, run, kills, steps)
            if code := process.wait(PATIENCE_S):
                raise SystemExit(f"the run ended with {code}: see {run}.output")
        finally:
            process.kill()
    done.write_text(f"{time.time() - began:.0f}")
    return float(done.read_text())


def _kill_each_kind(process: "subprocess.Popen[bytes]", run: Path, kills: Path, steps: int) -> None:
    """Kill a process of each kind that was not killed yet, spread over the run's steps."""
    killed = {json.loads(line)["kind"] for line in kills.open()} if kills.exists() else set()
    kills.touch()
    for number, kind in enumerate(KINDS):
        if kind in killed:
            continue
        if not _reached(process, run, steps * (number + 1) // (len(KINDS) + 1)):
            return
        victim = next(_processes_of(process.pid, run, kind), None)
        if victim is None:
            raise SystemExit(f"there is no process of {kind} to kill")
        os.kill(victim, signal.SIGKILL)
        with kills.open("a") as file:
            file.write(json.dumps({"kind": kind, "after_step": _step(run)}) + "\n")


def _reached(process: "subprocess.Popen[bytes]", run: Path, step: int) -> bool:
    """Wait until a step was taken; False if the run ended before."""
    until = time.monotonic() + PATIENCE_S
    while _step(run) < step:
        if process.poll() is not None or time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def _processes_of(driver: int, run: Path, kind: str) -> Iterator[int]:
    """The processes of a kind."""
    if kind == "environment":
        yield from (pid for pid, command in descendants(driver) if command.startswith(b"ray::ActorHost"))
    else:
        name = "Judged_0" if kind == "judge" else kind
        said = _PROCESS.findall((run / "ranks" / f"{name}.log").read_text())
        yield from (int(pid) for pid in said[-1:])


def _step(run: Path) -> int:
    """The last step that was recorded."""
    return max((line["step"] for line in _metrics(run)), default=0)


def _metrics(run: Path) -> list[dict[str, float]]:
    """The records of training steps."""
    return [line for line in _lines(run) if "loss/policy" in line]


def _lines(run: Path) -> list[dict[str, float]]:
    path = run / "metrics.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


if __name__ == "__main__":
    sys.exit(main())
