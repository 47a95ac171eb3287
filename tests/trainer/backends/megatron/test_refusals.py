"""What Megatron-Core cannot divide or compute here is refused by name, with what to take in its place."""

import sys

import pytest
from transformers import LlamaConfig

from rollgym.trainer.backends.rank_group import MeshShape
from rollgym.trainer.config.run import RunSettings
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.models.division import check_layout
from rollgym.trainer.run.models import check_trainable
from rollgym.trainer.run.roles import mesh_shape
from tests.support.megatron_ranks import family_head


def run_with(**changes) -> RunSettings:
    return RunSettings(**{"tasks": [{"env_id": "FrozenLake-v0"}], "backend": {"kind": "megatron"}, **changes})


def test_a_run_is_refused_before_it_begins(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "megatron"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "meta_path", [])
    with pytest.raises(ConfigError, match=r"pip install .*\[megatron\]'"):
        check_trainable(run_with())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"model": {"lora": {}}},
            "adapters are not trained by backend.kind megatron: take backend.kind fsdp2",
        ),
        ({"model": {"compile": "inductor"}}, "model.compile"),
        ({"optimizer": {"fused": True}}, "optimizer.fused"),
        ({"model": {"device": "cpu"}}, "computes on CUDA devices only"),
    ],
)
def test_what_it_does_not_do_is_refused(changes, said, monkeypatch):
    monkeypatch.setattr("rollgym.trainer.run.models.find_spec", lambda name: object())
    with pytest.raises(ConfigError, match=said):
        check_trainable(run_with(**changes))


def test_the_mesh_of_a_run_is_the_ranks():
    mesh = {"tensor": 2, "pipeline": 2, "context": 2, "expert": 4, "data": 4}
    settings = run_with(backend={"kind": "megatron", "ranks": 32, "mesh": mesh})
    shape = mesh_shape(settings, 32)
    assert shape == MeshShape(**mesh)
    assert shape.size == 32
    assert [rank for rank in range(32) if shape.speaks(rank)] == [16, 20, 24, 28]
    assert MeshShape(data=2, tensor=2).dimensions == {"data": 2, "tensor": 2}


@pytest.mark.parametrize(
    ("family", "mesh", "said"),
    [
        (
            "qwen2",
            MeshShape(tensor=4),
            r"backend.mesh.tensor 4 does not divide num_key_value_heads \(2\): take 2",
        ),
        ("qwen3", MeshShape(pipeline=3), r"backend.mesh.pipeline 3 does not divide num_hidden_layers \(2\)"),
        ("llama", MeshShape(data=2, expert=2), "a model of type llama has no experts: leave it out"),
        (
            "qwen3_moe",
            MeshShape(data=3, expert=3),
            r"mesh.expert 3 does not divide the number of experts \(4\)",
        ),
        ("qwen3_moe", MeshShape(data=2, expert=4), "does not divide the 2 ranks of mesh.data"),
    ],
)
def test_what_cannot_be_divided_is_refused_with_its_remedy(family, mesh, said):
    with pytest.raises(ConfigError, match=said):
        check_layout(family_head(family, "policy").body.config, mesh)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "gemma2"}, "models of type gemma2 are not built here"),
        ({"attention_bias": True}, "biases of attention"),
        ({"mlp_bias": True}, "biases of the layers between"),
        ({"hidden_act": "gelu"}, "the activation gelu"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding windows"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rotary embeddings of type yarn"),
        ({"mlp_only_layers": [0]}, "layers without experts"),
    ],
)
def test_models_that_are_not_built_here_are_refused(changes, said):
    config = LlamaConfig(num_hidden_layers=2)
    check_layout(config, MeshShape())
    for name, value in changes.items():
        setattr(config, name, value)
    with pytest.raises(ConfigError, match=said):
        check_layout(config, MeshShape())


def test_experts_and_divided_layers_need_divided_activations():
    config = family_head("qwen3_moe", "policy").body.config
    with pytest.raises(ConfigError, match=r"backend\.sequence_parallel false"):
        check_layout(config, MeshShape(tensor=2), sequence_parallel=False)
    check_layout(config, MeshShape(), sequence_parallel=False)
