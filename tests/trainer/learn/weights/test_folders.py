"""Weights on disk: what a server reads there are the trainer's, or nothing at all."""

import asyncio
import errno
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from rollgym.trainer.backends.heads import PolicyHead
from rollgym.trainer.backends.torch_backend import Schedule, TorchBackend
from rollgym.trainer.config.optimizer import OptimizerSettings
from rollgym.trainer.core.errors import ConfigError, RunError
from rollgym.trainer.learn.weights import folders as folders_module
from rollgym.trainer.learn.weights.folders import ModelLayout, WeightFolderError, WeightFolders, shared_head
from rollgym.trainer.learn.weights.publisher import BackendWeights
from rollgym.trainer.models import shards
from rollgym.trainer.models.tiny import build_tiny_tokenizer
from tests.support.tiny_models import sharp_model

IDS = torch.tensor([[3, 9, 4, 1, 27]])


def backend_of(model):
    return TorchBackend(PolicyHead(model, 1.0), OptimizerSettings(), Schedule(1e-3, 0, 1, "constant"))


def untied_model():
    config = LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return build_tiny_tokenizer()


@pytest.fixture
def model():
    return sharp_model()


@pytest.fixture
def folders(tmp_path, model, tokenizer):
    with WeightFolders(tmp_path / "weights", ModelLayout(model, tokenizer)) as opened:
        yield opened


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


def names_in(directory):
    return sorted(path.name for path in directory.iterdir() if path.is_dir())


def test_a_folder_loads_as_the_same_model(folders, model, tokenizer):
    folder = folders.write(3, backend_of(model).export())
    assert folder.is_absolute()
    assert folder.name == "version-00000003"
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(folder)), logits(model))
    assert AutoTokenizer.from_pretrained(folder).encode("Left 1 2") == tokenizer.encode("Left 1 2")
    assert all(file.stat().st_mode & 0o044 for file in folder.glob("*.safetensors"))


def test_a_folder_is_described_as_the_library_describes_it(folders, model, tmp_path):
    """vLLM takes a folder whose configuration names no architecture for a model that only embeds."""
    folder = folders.write(0, backend_of(model).export())
    model.save_pretrained(tmp_path / "library")
    for name in ("config.json", "generation_config.json"):
        ours, theirs = ((each / name).read_text() for each in (folder, tmp_path / "library"))
        assert json.loads(ours) == json.loads(theirs)


@pytest.mark.parametrize("shard_bytes", [1, 3000, 10**9])
def test_the_cut_into_files_changes_nothing(tmp_path, model, tokenizer, shard_bytes):
    with WeightFolders(tmp_path, ModelLayout(model, tokenizer), shard_bytes) as folders:
        folder = folders.write(0, backend_of(model).export())
        sizes = {name: tensor.numel() * 4 for name, tensor in backend_of(model).export()}
        assert folders.bytes_written == sum(sizes.values())
        files = sorted(folder.glob("*.safetensors"))
        assert (len(files) == 1) == (shard_bytes == 10**9)
        for file in files:
            held = load_file(file)
            assert len(held) == 1 or sum(sizes[name] for name in held) <= shard_bytes
        if len(files) > 1:
            index = json.loads((folder / "model.safetensors.index.json").read_text())
            assert set(index["weight_map"]) == set(sizes)
        assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(folder)), logits(model))


def test_a_head_of_its_own_is_written_for_servers_that_need_one(tmp_path, model, tokenizer):
    """A server then loads, and reloads, two tensors; the policy is the same."""
    assert shared_head(model) == folders_module.SharedHead("lm_head.weight", "model.embed_tokens.weight")
    with WeightFolders(tmp_path, ModelLayout(model, tokenizer, separate_head=True)) as folders:
        folder = folders.write(0, backend_of(model).export())
        held = load_file(folder / "model.safetensors")
        assert torch.equal(held["lm_head.weight"], held["model.embed_tokens.weight"])
        loaded = AutoModelForCausalLM.from_pretrained(folder)
        assert not loaded.config.tie_word_embeddings
        assert loaded.lm_head.weight is not loaded.model.embed_tokens.weight
        assert torch.equal(logits(loaded), logits(model))
    assert model.config.tie_word_embeddings, "the trainer's own model stays as it is"


def test_a_model_whose_head_is_its_own_stays_as_it_is(tmp_path, tokenizer):
    model = untied_model()
    assert shared_head(model) is None
    with WeightFolders(tmp_path, ModelLayout(model, tokenizer, separate_head=True)) as folders:
        folder = folders.write(0, backend_of(model).export())
        assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(folder)), logits(model))


def test_only_the_current_version_stays(folders, model, tmp_path):
    for version in (1, 2, 3):
        folders.write(version, backend_of(model).export())
        folders.keep_only(version)
    assert names_in(tmp_path / "weights") == ["version-00000003"]


def test_a_version_that_is_written_again_takes_the_place_of_the_old_one(folders, model):
    first = folders.write(1, backend_of(model).export())
    other = sharp_model(1)
    assert folders.write(1, backend_of(other).export()) == first
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(first)), logits(other))


def test_a_full_disk_leaves_nothing_behind_and_names_the_remedy(folders, model, tmp_path, monkeypatch):
    folders.write(1, backend_of(model).export())

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shards, "save_file", full)
    with pytest.raises(
        WeightFolderError, match=r"version 2 .*No space left.*GiB are free.*weights\.directory"
    ):
        folders.write(2, backend_of(model).export())
    assert names_in(tmp_path / "weights") == ["version-00000001"]


def test_a_disk_that_is_gone_is_named_with_the_remedy(folders, model, tmp_path):
    shutil.rmtree(tmp_path / "weights")
    (tmp_path / "weights").symlink_to(tmp_path / "gone")
    with pytest.raises(
        WeightFolderError, match=r"version 1 .*weights is not there: bring it back, or .*weights\.directory"
    ):
        folders.write(1, model.state_dict().items())


def test_copies_are_cleared_away_with_the_run_and_after_one_that_was_killed(tmp_path, model, tokenizer):
    for name in ("unfinished-version-00000007", "version-00000006", "start", "the_users_own"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "model.safetensors").write_bytes(b"half")
    with WeightFolders(tmp_path, ModelLayout(model, tokenizer)) as folders:
        assert names_in(tmp_path) == ["the_users_own"]
        folders.write(1, backend_of(model).export())
    assert names_in(tmp_path) == ["the_users_own"]


def test_the_model_that_servers_start_with_outlives_the_versions(folders, model, tmp_path):
    start = folders.write_start(backend_of(model).export())
    folders.write(1, backend_of(model).export())
    folders.keep_only(2)
    assert names_in(tmp_path / "weights") == ["start"]
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(start)), logits(model))


def test_two_processes_never_write_to_one_directory(folders, tmp_path, model, tokenizer):
    with (
        pytest.raises(ConfigError, match=r"weights\.directory .* is in use by process"),
        WeightFolders(tmp_path / "weights", ModelLayout(model, tokenizer)),
    ):
        raise AssertionError("both hold it")


def test_servers_may_see_the_directory_under_another_name(tmp_path, model, tokenizer):
    with WeightFolders(tmp_path, ModelLayout(model, tokenizer), seen_as=tmp_path / "mnt") as folders:
        assert folders.write(4, backend_of(model).export()) == tmp_path / "mnt" / "version-00000004"


async def test_a_version_is_written_once_however_many_ask(folders, model):
    source = BackendWeights(backend_of(model), 5, folders)
    first, *others = await asyncio.gather(*(source.folder() for _ in range(4)))
    assert set(others) == {first}
    assert folders.bytes_written == sum(tensor.numel() * 4 for _, tensor in source.tensors())


async def test_who_no_longer_waits_for_a_version_leaves_it_written_for_the_others(folders, model):
    source = BackendWeights(backend_of(model), 5, folders)
    asking = asyncio.ensure_future(source.folder())
    await asyncio.sleep(0)
    asking.cancel()
    await source.folder()
    assert asking.cancelled()
    assert folders.bytes_written == sum(tensor.numel() * 4 for _, tensor in source.tensors())


async def test_weights_that_training_has_changed_are_not_given_out_as_the_old_ones(folders, model):
    written, other = (
        BackendWeights(backend_of(model), 5, folders),
        BackendWeights(backend_of(model), 6, folders),
    )
    folder = await written.folder()
    for source in (written, other):
        source.release()
        with pytest.raises(RunError, match="are the trainer's no more"):
            source.tensors()
    assert await written.folder() == folder
    with pytest.raises(RunError, match="version 6 are the trainer's no more"):
        await other.folder()
