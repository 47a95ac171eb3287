"""What plays in `roll-train rollout` and `eval` before a run has trained it, and which runs take structured outputs."""

import json
from pathlib import Path

import pytest

from rollgym.trainer.cli import main
from rollgym.trainer.config.load import load_settings
from rollgym.trainer.models.load import save_model
from rollgym.trainer.models.tiny import build_tiny_tokenizer
from rollgym.trainer.run.players import why_unstructured
from tests.support.gguf_files import small_llama

SET = "evaluation.sets={lakes: {env_id: FrozenLake-v0, kwargs: {size: 3}, episodes: 2, baselines: false}}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("models") / "small"
    save_model(small_llama(), build_tiny_tokenizer(), path)
    return path


def words(folder: Path, output: Path, *more: str) -> list[str]:
    return [
        "tasks=[{env_id: FrozenLake-v0, kwargs: {size: 3}}]",
        f"model={{path: {folder}, max_length: 256}}",
        "rollout={groups_per_step: 1, group_size: 2, max_turns: 2, max_new_tokens: 4}",
        "algorithm=grpo",
        "tracking={tensorboard: false}",
        f"output_dir={output}",
        *more,
    ]


def test_a_rollout_plays_it_and_says_so(folder, tmp_path, capsys):
    played = tmp_path / "played.jsonl"
    run = words(folder, tmp_path / "run")
    assert main(["rollout", *run, "--episodes", "1", "--output", str(played)]) == 0
    said = f"no run has trained a policy in {tmp_path / 'run'}: {folder} plays as it is"
    assert said in capsys.readouterr().err
    assert json.loads(played.read_text().splitlines()[0])["turns"]
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_it_is_measured_before_and_the_trained_policy_afterwards(folder, tmp_path, capsys):
    run = words(folder, tmp_path / "run", SET)
    assert main(["eval", *run]) == 0
    assert "plays as it is" in capsys.readouterr().err
    assert main([*run, "steps=1", "evaluation.every=0"]) == 0
    assert main(["eval", *run]) == 0
    assert "plays as it is" not in capsys.readouterr().err


def test_adapters_that_are_new_change_nothing(folder, tmp_path, capsys):
    run = words(folder, tmp_path / "run", "model.lora={rank: 2}")
    assert main(["rollout", *run, "--episodes", "1"]) == 0
    assert "plays as it is" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["rollout", "eval"])
def test_without_a_model_or_with_lost_checkpoints_nothing_plays(folder, tmp_path, capsys, command):
    no_path = [word for word in words(folder, tmp_path / "run", SET) if not word.startswith("model=")]
    assert main([command, *no_path]) == 2
    assert "name one with --checkpoint, or a model with model.path, which plays as it is" in (
        capsys.readouterr().err
    )
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    assert main([command, *words(folder, tmp_path / "run", SET)]) == 2


def test_an_export_takes_no_model_that_was_not_trained(folder, tmp_path, capsys):
    run = words(folder, tmp_path / "run")
    assert main(["export", *run, "--output", str(tmp_path / "out")]) == 2
    assert "there is no trained policy" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        ([], ""),
        (["rollout.top_p=0.9"], ""),
        (["algorithm.proximal=behaviour"], "algorithm.proximal or algorithm.correction compares"),
        (["algorithm.correction={kind: band}"], "take proximal 'recomputed' without correction"),
    ],
)
def test_runs_that_compare_log_probabilities_at_sampling_take_none(overrides, why):
    settings = load_settings(None, ["tasks=[{env_id: FrozenLake-v0}]", *overrides])
    assert why in why_unstructured(settings)
    assert bool(why) == bool(why_unstructured(settings))
