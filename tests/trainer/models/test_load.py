"""`model.path` names a folder or a model of the Hugging Face hub; without a network the way out is said."""

import re
import shlex
import shutil
import socket
from pathlib import Path

import pytest
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import Qwen2Config, Qwen2ForCausalLM

import rollgym.trainer.models.load
import rollgym.trainer.run.dry_run
from rollgym.trainer.cli import main
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.models.load import load_model, load_tokenizer, model_folder, save_model
from rollgym.trainer.models.tiny import build_tiny_tokenizer
from tests.support.processes import ROOT

NAME = "Qwen/Qwen2.5-0.5B-Instruct"
GUIDE = ROOT / "docs" / "guides" / "own_model.md"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch) -> Path:
    """An empty cache, and a hub that nobody answers for."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return tmp_path / "hub"


@pytest.fixture
def cached(hub: Path) -> Path:
    """A model of that name in the cache, as the hub's own client lays it out: the family is right, the size tiny."""
    folder = hub / f"models--{NAME.replace('/', '--')}"
    snapshot = folder / "snapshots" / "0123456789abcdef"
    tokenizer = build_tiny_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    save_model(Qwen2ForCausalLM(config), tokenizer, snapshot)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(snapshot.name)
    return snapshot


def test_a_model_in_the_cache_needs_no_network(cached):
    assert model_folder(NAME) == cached
    assert load_model(model_folder(NAME)).config.model_type == "qwen2"


def test_a_folder_is_itself(tmp_path):
    assert model_folder(str(tmp_path)) == tmp_path


def test_without_a_network_the_way_out_is_said(hub):
    with pytest.raises(ConfigError) as refused:
        model_folder(NAME)
    for word in (f"no folder {NAME} here", "cannot be reached", "hf download", "HF_HOME", "HF_HUB_OFFLINE=1"):
        assert word in str(refused.value)


def test_a_hub_that_says_nothing_is_not_waited_for_long(hub, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(rollgym.trainer.models.load, "_HUB_TIMEOUT_S", 0.3)
        with pytest.raises(ConfigError, match="cannot be reached"):
            model_folder(NAME)


def test_offline_the_cache_is_named(hub, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"in the cache .*/hub, and HF_HUB_OFFLINE forbids"):
        model_folder(NAME)


def test_a_cache_that_was_left_half_filled_is_filled(cached, monkeypatch):
    (cached / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="cannot be reached"):
        model_folder(NAME)


def commands() -> list[list[str]]:
    """What the guide's blocks tell to type."""
    blocks = re.findall(r"```bash\n(.*?)```", GUIDE.read_text(), flags=re.S)
    return [shlex.split(line) for block in blocks for line in block.splitlines()]


@pytest.mark.slow
def test_every_command_of_the_guide_runs(cached, tmp_path, monkeypatch, capfd):
    shutil.copytree(ROOT / "examples", tmp_path / "clone" / "examples")
    monkeypatch.chdir(tmp_path / "clone")
    monkeypatch.setattr(rollgym.trainer.run.dry_run, "_PATIENCE_S", 60.0)  # this machine may be busy
    typed = commands()
    assert len(typed) >= 6
    for program, *words in typed:
        assert program == "roll-train"
        # Sizes are the tiny model's; keys, names and order are the guide's.
        code = main(
            [*words, "rollout.groups_per_step=1", "rollout.group_size=2", "tracking.tensorboard=false"]
        )
        printed = capfd.readouterr()
        assert code == 0, (words, printed.err)
    assert (tmp_path / "clone" / "runs" / "own_model" / "checkpoints" / "step_000002").is_dir()
    assert (tmp_path / "clone" / "runs" / "sooner" / "model" / "config.json").exists()


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", None),
        ("tokenizer.json", "{"),
        ("tokenizer.json", "{}"),
        ("tokenizer_config.json", "{"),
        ("*token*", None),
    ],
)
def test_a_tokenizer_that_is_missing_or_damaged_is_an_error_of_the_settings(cached, file, content):
    for path in list(cached.glob(file)):
        path.unlink()
        if content is not None:
            path.write_text(content)
    with pytest.raises(
        ConfigError, match=f"{cached} holds no tokenizer that can be loaded .*: put its files"
    ):
        load_tokenizer(cached)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", b"{"),
        ("config.json", b"null"),
        ("config.json", b'{"model_type": "of-nobody"}'),
        ("config.json", b'{"model_type": "qwen2", "num_hidden_layers": "three"}'),
        ("config.json", b'{"model_type": "qwen2", "hidden_size": 64}'),
        ("model.safetensors", b""),
        ("model.safetensors", b"\x00" * 500),
        ("model.safetensors", None),
    ],
)
def test_a_model_that_is_damaged_is_an_error_of_the_settings(cached, file, content):
    (cached / file).unlink()
    if content is not None:
        (cached / file).write_bytes(content)
    with pytest.raises(ConfigError, match=f"{cached} holds no model that can be loaded "):
        load_model(cached)


def test_a_model_that_lacks_weights_is_not_filled_up_at_random(cached):
    weights = load_file(cached / "model.safetensors")
    del weights["model.layers.0.mlp.up_proj.weight"], weights["model.norm.weight"]
    save_file(weights, cached / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lack model\.layers\.0\.mlp\.up_proj\.weight and 1 more"):
        load_model(cached)


def test_a_probe_tells_of_a_damaged_model(cached, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(rollgym.trainer.run.dry_run, "_environments", _nothing_asked)
    (cached / "config.json").write_text("{")
    words = [f"model.path={cached}", "tasks=[{env_id: FrozenLake-v0}]", f"output_dir={tmp_path}/run"]
    assert main([*words, "--dry-run", "--probe"]) == 2
    assert "probe: model: " in (said := capsys.readouterr().err)
    assert "holds no model that can be loaded" in said


async def _nothing_asked(settings, console):
    return "nobody was asked"
