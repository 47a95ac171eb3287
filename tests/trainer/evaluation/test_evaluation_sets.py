"""Evaluation sets whose rows are trained on are told."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from rollgym.trainer.cli import main
from rollgym.trainer.config.data import DatasetSettings, EvaluationSetSettings
from rollgym.trainer.evaluation.evaluation_sets import EvaluationSet, overlap_warnings
from rollgym.trainer.tasks.dataset import load_streams

ROWS = [{"question": f"{number} + 1", "answer": str(number + 1)} for number in range(9)]
KIND = {"verifier": "Math-v0"}


def written(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def evaluation_set(count: int, **data) -> EvaluationSet:
    settings = EvaluationSetSettings(episodes=count, dataset={**KIND, **data})
    assert settings.dataset is not None
    (stream,) = load_streams(settings.dataset.model_copy(update={"shuffle": False}))
    tasks = (stream.item(number, number, 0) for number in range(count))
    return EvaluationSet("held", tuple(replace(task, domain="held") for task in tasks), settings)


def told(train: Path, *sets: EvaluationSet, **data) -> list[str]:
    return list(overlap_warnings(load_streams(DatasetSettings(path=str(train), **KIND, **data)), sets))


@pytest.fixture
def train(tmp_path: Path) -> Path:
    return written(tmp_path / "train.jsonl", ROWS)


def test_the_training_file_by_any_name(tmp_path, train):
    link, copy = tmp_path / "link.jsonl", tmp_path / "copy.jsonl"
    link.symlink_to(train)
    shutil.copy(train, copy)
    (tmp_path / "sub").mkdir()
    for path in (train, link, copy, tmp_path / "sub" / ".." / "train.jsonl"):
        # Under other columns the tasks differ, and the rows are the same.
        for fields in ({}, {"columns": {"hint": "question"}}):
            (line,) = told(train, evaluation_set(4, path=str(path), **fields))
            assert line.startswith(
                "warning: evaluation set 'held': 4 of its 4 rows are trained on, too (the first: "
            )
            assert "line 1): its scores will not show" in line


def test_rows_of_other_files_are_counted_by_their_tasks(tmp_path, train):
    mixed = written(tmp_path / "held.jsonl", [{"question": "77 + 1", "answer": "78"}, ROWS[8], ROWS[3]])
    (line,) = told(train, evaluation_set(3, path=str(mixed)))
    assert f"2 of its 3 rows are trained on, too (the first: {mixed}, line 2)" in line


def test_rows_that_are_held_out_are_not_told(tmp_path, train):
    held = written(
        tmp_path / "held.jsonl", [{"question": f"{number} - 1", "answer": "?"} for number in range(9)]
    )
    environments = EvaluationSet("games", (), EvaluationSetSettings(env_id="FrozenLake-v0"))
    assert told(train, evaluation_set(9, path=str(held)), environments) == []
    # Of one file, rows are trained on and others are held out.
    marked = written(
        tmp_path / "all.jsonl", [{**row, "level": number % 2} for number, row in enumerate(ROWS)]
    )
    even = {"difficulty": {"column": "level", "maximum": 0}}
    odd = {"difficulty": {"column": "level", "minimum": 1}}
    assert told(marked, evaluation_set(4, path=str(marked), **odd), **even) == []
    (line,) = told(marked, evaluation_set(4, path=str(marked), **even), **even)
    assert "4 of its 4 rows" in line


def test_a_probe_tells_it(tmp_path, train, capfd):
    data = orjson.dumps([{"path": str(train), **KIND}]).decode()
    sets = orjson.dumps({"held": {"episodes": 3, "dataset": {"path": str(train), **KIND}}}).decode()
    assert main(["--dry-run", "--probe", f"datasets={data}", f"evaluation.sets={sets}"]) == 0
    said = " ".join(capfd.readouterr().out.split())
    assert "probe: warning: evaluation set 'held': 3 of its 3 rows are trained on, too" in said
