"""`rollgym.train`: what the command does, from a program."""

import asyncio
import gc
from pathlib import Path
from typing import Any

import pytest
import yaml

import rollgym
from rollgym.trainer.config.load import load_settings
from rollgym.trainer.records.trajectory import Trajectory
from rollgym.trainer.run.learning import _resolved, train
from tests.support.processes import read_lines
from tests.support.recorded_numbers import undeclared_numbers

CONFIG: dict[str, Any] = {
    "seed": 3,
    "steps": 5,
    "threads": 1,
    "tasks": [
        {"env_id": "FrozenLake-v0", "kwargs": {"size": 4, "max_episode_steps": 4}},
    ],
    "model": {"hidden_size": 32, "layers": 1, "heads": 2, "max_length": 96},
    "prompt": {"context": "single_turn", "instruction": "none"},
    "rollout": {"groups_per_step": 2, "group_size": 2, "max_turns": 4, "max_new_tokens": 3},
    "evaluation": {"every": 0},
    "tracking": {"tensorboard": False},
}


PASSED_OVER: list[int] = []
"""How much the collector of garbage does not look through, at each reward."""


def a_tenth(trajectory: Trajectory) -> list[float]:
    """A reward of this module."""
    PASSED_OVER.append(gc.get_freeze_count())
    return [0.1 + index for index, _ in enumerate(trajectory.turns)]


def test_a_program_trains_as_the_command_does(tmp_path: Path) -> None:
    reward = {"reward": a_tenth}
    directory = rollgym.train(CONFIG, steps=1, output_dir=tmp_path / "run", rollout=reward)
    # What was imported is not looked through while episodes wait, and all of it is again when the run has ended.
    assert min(PASSED_OVER) > 100_000
    assert gc.get_freeze_count() == 0
    assert directory == tmp_path / "run"
    assert (directory / "model" / "config.json").exists()
    episodes = read_lines(directory / "episodes.jsonl")
    assert episodes[0]["turns"][0]["reward"] == 0.1
    assert len([line for line in read_lines(directory / "metrics.jsonl") if "time/step_s" in line]) == 1
    assert undeclared_numbers(directory) == set()


@pytest.mark.parametrize("kind", ["file", "mapping", "settings"])
def test_overrides_are_laid_over_settings_key_by_key(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(CONFIG))
    given: Any = {"file": str(path), "mapping": CONFIG, "settings": load_settings(path)}[kind]
    before = yaml.safe_dump(CONFIG)
    laid = {
        "steps": 7,
        "rollout": {"group_size": 4, "reward": a_tenth},
        "optimizer": {"learning_rate": 1e-05},
    }
    found = _resolved(given, laid, "train")
    words = ["steps=7", "rollout.group_size=4", f"rollout.reward={__name__}:a_tenth"]
    assert found == load_settings(path, [*words, "optimizer.learning_rate=1.0e-5"])
    assert yaml.safe_dump(CONFIG) == before, "what is the caller's stays as it is"


def test_a_part_of_another_kind_takes_the_place_of_the_whole() -> None:
    settings = CONFIG | {"algorithm": {"advantage": {"kind": "group", "baseline": "none"}}}
    found = _resolved(settings, {"algorithm": {"advantage": {"kind": "turn"}}}, "train")
    assert found.algorithm.advantage.kind == "turn"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"rollout": {"reward": lambda trajectory: []}}, "rollout.reward: .*has no name in a module"),
        ({"rollout": {"reward": CONFIG.get}}, "rollout.reward: .*has no name in a module"),
        ({"seed": object()}, "seed: a object is no value of a setting"),
        ({"stepps": 3}, "stepps"),
        ({"tasks": [{"kwargs": {"x": {1}}}]}, "tasks.0.kwargs.x: a set is no value"),
    ],
)
def test_what_makes_no_sense_is_told(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(rollgym.ConfigError, match=message):
        train(CONFIG, **overrides)


def test_a_pipeline_needs_its_section() -> None:
    with pytest.raises(rollgym.ConfigError, match="sft"):
        train(CONFIG, command="sft")


def test_a_notebook_is_told_to_await() -> None:
    async def cell() -> None:
        train(CONFIG)

    with pytest.raises(RuntimeError, match=r"await rollgym.train_async"):
        asyncio.run(cell())
