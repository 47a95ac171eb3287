"""A LoRA run from its start to the folders that other tools load: trained, resumed, measured, exported."""

import json
import os
import resource
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rollgym.trainer import cli
from rollgym.trainer.config import checks
from rollgym.trainer.config.load import load_settings
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.core.run_files import WriteError, output_lock, write_errors
from rollgym.trainer.models.load import save_weights
from rollgym.trainer.models.lora import adapter_tensors, save_adapter
from rollgym.trainer.models.weights import parameters_of
from rollgym.trainer.records.checkpoint import CheckpointStore, RunState, load_checkpoint
from rollgym.trainer.run.trained_policy import trained_policy
from tests.support.processes import env_server
from tests.support.tiny_models import adapted_model, sharp_model

WORDS = [
    "tasks=[{env_id: FrozenLake-v0, kwargs: {size: 3, split: train, max_episode_steps: 6}}]",
    "model={hidden_size: 32, layers: 1, heads: 2, max_length: 96, lora: {rank: 4}}",
    "prompt={context: single_turn, instruction: none}",
    "warm_start={demonstrations: 8, epochs: 1, batch_rows: 8}",
    "rollout={groups_per_step: 2, group_size: 2, max_turns: 6, max_new_tokens: 3}",
    "algorithm={preset: ppo, kl: {coefficient: 0.1, placement: loss}}",
    "evaluation.every=0",
    "checkpoint={every: 1, resume: auto}",
    "tracking={tensorboard: false, console: false}",
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A run of two steps that was ended after the first one and went on."""
    directory = tmp_path_factory.mktemp("lora") / "run"
    with env_server("--allow-expert") as url:
        for steps in (1, 2):
            assert cli.main([*WORDS, f"env_url={url}", f"output_dir={directory}", f"steps={steps}"]) == 0
    return directory


def exported(directory, *words):
    return cli.main(["export", *WORDS, f"output_dir={directory}", *words])


def test_a_lora_run_goes_on_and_leaves_adapters(directory):
    assert (directory / "adapter" / "adapter_config.json").exists()
    assert not (directory / "model").exists()
    newest = sorted((directory / "checkpoints").glob("step_*"))[-1]
    state = torch.load(newest / "policy.pt", weights_only=True)
    assert state["model"]
    assert all(".lora_" in name for name in state["model"]), "the frozen weights are in no checkpoint"
    reference = torch.load(newest / "reference.pt", weights_only=True)
    assert set(reference) == {"adapters"}
    assert reference["adapters"], "a warm start trained them before the run began"
    steps = [json.loads(line)["step"] for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(steps)


def test_merged_or_alone_the_policy_is_the_same(directory, tmp_path, capsys):
    settings = load_settings(None, [*WORDS, f"output_dir={directory}"])
    expected = dict(parameters_of(trained_policy(settings, None).model))
    newest = sorted((directory / "checkpoints").glob("step_*"))[-1]
    of_checkpoint = dict(parameters_of(trained_policy(settings, newest).model))
    assert exported(directory, "--output", str(tmp_path / "merged")) == 0
    assert exported(directory, "--adapter", "--output", str(tmp_path / "alone")) == 0
    assert f"model: {tmp_path / 'merged'}" in capsys.readouterr().out
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    for name, parameter in merged.named_parameters():
        assert torch.equal(parameter, expected[name])
        assert torch.equal(of_checkpoint[name], expected[name])
    alone, kept = (
        load_file(each / "adapter_model.safetensors") for each in (tmp_path / "alone", directory / "adapter")
    )
    assert all(torch.equal(alone[name], kept[name]) for name in kept)
    loaded = dict(parameters_of(trained_policy(settings, tmp_path / "alone").model))
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


@pytest.mark.parametrize("noted", [True, False])
def test_what_a_run_wrote_at_its_end_is_known_by_its_checkpoint_or_else_by_its_time(
    directory, tmp_path, noted
):
    """Runs of earlier releases did not note the checkpoint."""
    run = tmp_path / "run"
    shutil.copytree(directory, run)
    adapter = run / "adapter"
    if not noted:
        (adapter / "checkpoint.json").unlink()
    settings = load_settings(None, [*WORDS, f"output_dir={run}"])
    weights = load_file(adapter / "adapter_model.safetensors")
    save_file({name: tensor + 1.0 for name, tensor in weights.items()}, adapter / "adapter_model.safetensors")

    def takes_the_adapter():
        named = dict(adapter_tensors(trained_policy(settings, None).model))
        return all(torch.equal(tensor, weights[name] + 1.0) for name, tensor in named.items())

    assert takes_the_adapter()
    os.utime(adapter / "adapter_config.json", (0, 0))
    assert takes_the_adapter() == noted
    os.utime(adapter / "adapter_config.json")
    # It went back and came to the same step once more.
    newest = sorted((run / "checkpoints").glob("step_*"))[-1]
    state = json.loads((newest / "state.json").read_text())
    CheckpointStore(run / "checkpoints", keep=2).save(
        RunState(state["step"], 9, 0, ()), load_checkpoint(newest).parts
    )
    os.utime(adapter / "adapter_config.json")
    assert takes_the_adapter() == (not noted), "times cannot tell"


def test_what_cannot_be_exported_is_refused_in_a_line(directory, tmp_path, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    assert exported(directory, "--output", str(tmp_path / "full")) == 2
    assert "holds something already: name another folder" in capsys.readouterr().err
    assert exported(directory, "--output", str(tmp_path / "merged")) == 0
    again = ["--checkpoint", str(tmp_path / "merged"), "--adapter", "--output", str(tmp_path / "new")]
    assert exported(directory, *again) == 2
    assert "has no adapters beside its weights" in capsys.readouterr().err
    assert (tmp_path / "full" / "file").read_text() == "mine"


def test_a_folder_that_another_export_fills_is_left_alone(directory, tmp_path, capsys):
    (tmp_path / "model").mkdir()
    with output_lock(tmp_path / "model"):
        assert exported(directory, "--output", str(tmp_path / "model")) == 2
    assert f"--output {tmp_path / 'model'} is in use by another process" in capsys.readouterr().err
    assert not list((tmp_path / "model").iterdir())


def test_adapters_without_the_package_are_refused_before_anything_begins(monkeypatch):
    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"model\.lora needs the package peft: pip install .*\[lora\]'"):
        checks.check_settings(load_settings(None, WORDS))


@pytest.mark.parametrize("what", ["model", "adapter"])
def test_a_full_disk_under_a_model_is_an_error_of_the_disk(what, tmp_path):
    model = adapted_model(1) if what == "adapter" else sharp_model()
    write = save_adapter if what == "adapter" else save_weights
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (512, limits[1]))
    try:
        with (
            pytest.raises(WriteError, match=r"cannot write .*safetensors: File too large"),
            write_errors(tmp_path),
        ):
            write(model, tmp_path / "model")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
