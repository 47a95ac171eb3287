"""Folders of runs, whole and hostile, whose pages are looked at."""

import json
from pathlib import Path

from rollgym.trainer.evaluation.reporting.page import render_page
from rollgym.trainer.evaluation.reporting.run_folder import read_run
from rollgym.trainer.inference.base import GenerationResult
from rollgym.trainer.records.group import Group
from rollgym.trainer.records.trajectory import Timeline, Trajectory, TrajectoryOutcome, Turn
from rollgym.trainer.rollout.recorder import Recorder
from rollgym.trainer.tasks.task import Task

HOSTILE = "</script></title><img src=x onerror=alert(1)>\"'><svg onload=alert(1)> {{7*7}} \u2028 \ud800 \x00 &lt;b&gt;"


def episode(step: int, index: int, text: str = "Right", tokens: int = 3, domain: str = "lake") -> dict:
    """A line of episodes.jsonl."""
    task = Task(index, "FrozenLake-v0", 7, {"size": 4}, None, domain)
    trajectory = Trajectory(task, 1, outcome=TrajectoryOutcome.SOLVED, metrics={"steps": 2.0})
    recorder = Recorder(trajectory)
    for number_, prompt in enumerate([[1, 2, 3], [1, 2, 3, *[5] * tokens, 4]]):
        segment = recorder.place(prompt)
        result = GenerationResult([5] * tokens, [-0.25] * tokens, [step] * tokens, "length")
        start, end = recorder.record(segment, result, number_)
        turn = Turn(segment, start, end, f"board {text}", text, reward=0.5, finish_reason="length")
        turn.advantages = [0.75 if number_ else -0.75] * tokens
        trajectory.turns.append(turn)
    trajectory.timeline = Timeline.from_seconds({"generate": 1.5, "environment": 0.5})
    group = Group(index, task, step, decision="kept").as_record(0)
    return {"step": step, "group": group, **trajectory.as_record()}


def metrics(step: int, domain: str = "lake") -> dict:
    """A line of metrics.jsonl that a training step wrote."""
    parts = {
        "generate": 1.0,
        "environment": 2.0,
        "verify": 0.0,
        "wait": 0.5,
        "train": 3.0,
        "sync": 0.25,
        "record": 0.25,
    }
    return {
        "step": step,
        "rollout/success": 0.125 * step,
        "rollout/reward": 0.1,
        "policy/entropy": None,
        "own/number": 1.0,
        "outcome/solved": 0.5,
        "outcome/failed": 0.5,
        "time/step_s": 7.0,
        "time/outside_s": 1.0,
        "time/tokens_per_s": 10.0,
        **{f"time/{name}_s": value for name, value in parts.items()},
        f"domain/{domain}/outcome/solved": 0.5,
        f"domain/{domain}/success": 0.25,
    }


def evaluation_set(step: int, name: str = "held_out", value: float = 0.5) -> dict:
    key = f"evaluate/{name}/sampled"
    bounds = {"success_low": value - 0.1, "success_high": value + 0.1, "episodes": 50.0}
    return {"step": step, f"{key}/success": value, **{f"{key}/{end}": bound for end, bound in bounds.items()}}


def write_run(directory: Path, *, steps: int = 6, text: str = "Right", name: str = "a run") -> Path:
    """A run as a trainer leaves it."""
    directory.mkdir(exist_ok=True)
    (directory / "config.yaml").write_text(f"name: {json.dumps(name)}\nsteps: {steps}\nenv_token: sesame\n")
    rows = [
        evaluation_set(0, value=0.2),
        *(metrics(step) for step in range(1, steps + 1)),
        evaluation_set(steps, value=0.8),
    ]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    episodes = [episode(step, step * 2 + place, text) for step in range(steps) for place in range(2)]
    (directory / "episodes.jsonl").write_text("".join(json.dumps(line) + "\n" for line in episodes))
    events = [{"task": 0, "fate": "issued"}, {"task": 0, "fate": "trained", "step": 0}]
    events += [{"task": 1, "fate": "dropped", "reason": "filter:zero_variance"}]
    (directory / "ledger.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return directory


def page_of(directory: Path) -> str:
    return render_page(read_run(directory), now=2e9)
