"""Shares of domains that follow what is learnt: tasks are functions of what was written down, after a resume too."""

import json

import pytest
from pydantic import ValidationError

from rollgym.trainer.cli import main
from rollgym.trainer.config.load import load_settings
from rollgym.trainer.config.rollout import CurriculumSettings, TaskSettings
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.core.run_files import DamagedFileError
from rollgym.trainer.tasks.curriculum import CURRICULUM_FILE, CurriculumTaskSource
from rollgym.trainer.tasks.task import EnvironmentStream
from tests.support.processes import read_lines

SETTINGS = CurriculumSettings(smoothing=0.0, floor=0.05)


def source_of(directory=None, step=0, block=10) -> CurriculumTaskSource:
    streams = [
        EnvironmentStream(TaskSettings(env_id="Lake-v0", domain=name)) for name in ("easy", "hard", "mixed")
    ]
    source = CurriculumTaskSource(streams, block, 7, SETTINGS)
    if directory is not None:
        source.take_up(directory, step)
    return source


def shares(source, block, size=10) -> dict[str, int]:
    found: dict[str, int] = {}
    for index in range(block * size, (block + 1) * size):
        domain = source.task(index).domain
        found[domain] = found.get(domain, 0) + 1
    return found


SOLVED = {"easy": [True] * 4, "hard": [False] * 4, "mixed": [True, False]}


def test_shares_follow_what_is_learnable_and_none_is_ever_without_a_task():
    source = source_of()
    assert shares(source, 0) == {"easy": 4, "hard": 3, "mixed": 3}
    metrics = source.follow(0, SOLVED, next_task=20)
    assert shares(source, 1) == {"easy": 4, "hard": 3, "mixed": 3}, "those tasks were given already"
    assert shares(source, 2) == {"easy": 1, "hard": 1, "mixed": 8}
    assert metrics == {"domain/easy/share": 0.1, "domain/hard/share": 0.1, "domain/mixed/share": 0.8}


def test_a_resumed_run_plays_the_tasks_that_it_would_have_played(tmp_path):
    whole = source_of(tmp_path)
    for step in range(6):
        solved = {
            "easy": [True, step % 2 == 0],
            "hard": [False] * (step + 1),
            "mixed": [True, False, step > 3],
        }
        whole.follow(step, solved, next_task=10 * (step + 2))
        if step == 3:
            kept = [whole.task(index) for index in range(60)]
    whole.close()
    resumed = source_of(tmp_path, step=4)
    assert [resumed.task(index) for index in range(60)] == kept
    assert len(read_lines(tmp_path / CURRICULUM_FILE)) == 4, "lines of steps that are trained again are cut"


def test_items_of_a_stream_come_one_after_the_other_whatever_its_shares():
    source = source_of()
    source.follow(0, SOLVED, next_task=5)
    source.follow(1, {"easy": [True, False]}, next_task=31)
    seen = [0, 0, 0]
    for block in range(8):
        change = next(each for each in reversed(source._changes) if each.block <= block)
        assert [
            before + (block - change.block) * count
            for before, count in zip(change.before, change.counts, strict=True)
        ] == seen
        seen = [one + count for one, count in zip(seen, change.counts, strict=True)]


@pytest.mark.parametrize(
    "line", [{"step": 0}, {"step": 0, "block": 1, "counts": [1, 2], "success": {}}, {"step": "x"}]
)
def test_a_damaged_log_is_named(tmp_path, line):
    (tmp_path / CURRICULUM_FILE).write_text(json.dumps(line) + "\n")
    with pytest.raises(DamagedFileError, match="line 1"):
        source_of(tmp_path, step=3)


def test_more_domains_than_tasks_are_refused():
    with pytest.raises(ConfigError, match="3 domains do not fit into a step of 2 groups"):
        source_of(block=2)


def test_a_curriculum_needs_shares_of_steps():
    with pytest.raises(ConfigError, match="set interleave to 'step'"):
        load_settings(None, ["tasks=[{env_id: FrozenLake-v0}]", "curriculum={}"])
    with pytest.raises(ValidationError):
        CurriculumSettings(smoothing=1.0)


@pytest.mark.slow
def test_a_run_of_games_and_questions_follows_what_it_learns(tmp_path):
    """One run mixes agentic tasks and verified ones; resumed, its tasks are those of a run that was not stopped."""
    lake = "{env_id: FrozenLake-v0, kwargs: {size: 4, split: train, max_episode_steps: 4}}"
    words = [
        f"tasks=[{lake}, {{env_id: Arithmetic-v0}}]",
        "interleave=step",
        "curriculum={smoothing: 0.5}",
        "rollout={groups_per_step: 4, group_size: 2, max_turns: 4, max_new_tokens: 3}",
        "model={hidden_size: 16, layers: 1, heads: 2, max_length: 512}",
        "tracking={tensorboard: false}",
        "evaluation.every=0",
        "deterministic=true",
    ]
    assert main([*words, "steps=4", f"output_dir={tmp_path}/whole"]) == 0
    assert main([*words, "steps=2", f"output_dir={tmp_path}/parts"]) == 0
    assert main([*words, "steps=4", "checkpoint.resume=auto", f"output_dir={tmp_path}/parts"]) == 0
    logs = [(tmp_path / name / CURRICULUM_FILE).read_text() for name in ("whole", "parts")]
    assert logs[0] == logs[1]
    tasks = [
        [each["task"] for each in read_lines(tmp_path / name / "episodes.jsonl")]
        for name in ("whole", "parts")
    ]
    assert tasks[0] == tasks[1]
    assert {task["domain"] for task in tasks[0]} == {"FrozenLake-v0", "Arithmetic-v0"}
    lines = read_lines(tmp_path / "whole" / "metrics.jsonl")
    assert any("domain/Arithmetic-v0/share" in line for line in lines)
