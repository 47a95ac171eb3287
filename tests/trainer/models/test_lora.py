"""Adapters: what they are equal to, what shares their model, and what is written of them."""

import asyncio
import copy
import json

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from rollgym.trainer.algorithms.aggregation import collect
from rollgym.trainer.backends.base import TrainRow
from rollgym.trainer.backends.forward_pass import ForwardPass
from rollgym.trainer.backends.heads import PolicyHead, ValueHead
from rollgym.trainer.backends.reference import PolicyWithoutAdapters
from rollgym.trainer.backends.torch_backend import Schedule, TorchBackend
from rollgym.trainer.config.model import LoraSettings
from rollgym.trainer.config.optimizer import OptimizerSettings
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.inference.base import GenerationRequest, SamplingParams
from rollgym.trainer.inference.engine.torch_engine import TorchEngine
from rollgym.trainer.learn.weights.publisher import BackendWeights
from rollgym.trainer.models.load import save_weights
from rollgym.trainer.models.lora import add_lora, is_adapter, load_adapter
from rollgym.trainer.models.value_head import ValueModel
from rollgym.trainer.models.weights import parameters_of, twin_of
from tests.support.tiny_models import VOCABULARY, reference_logprobs, sharp_model

LORA = LoraSettings(rank=4, alpha=8.0)
SCHEDULE = Schedule(1e-2, 0, 10, "constant")
IDS = [3, 9, 17, 4, 30, 22, 8]


def adapted(settings=LORA, seed=1):
    model = sharp_model()
    add_lora(model, settings, seed)
    return model


def backend_of(model):
    return TorchBackend(PolicyHead(model, 1.0), OptimizerSettings(gradient_clip=1e9), SCHEDULE)


def rows():
    mask = torch.tensor([False, *[True] * (len(IDS) - 1)])
    return [TrainRow(torch.tensor(IDS), mask), TrainRow(torch.tensor(IDS[::-1]), mask)]


def likelihood(micro):
    loss = -(micro.outputs * micro.mask).sum() / 12
    return loss, collect({"loss": (loss, torch.ones(()))})


def test_new_adapters_change_nothing_and_equal_seeds_make_them_equal():
    model, again, other = adapted(), adapted(), adapted(seed=2)
    assert reference_logprobs(model, IDS) == reference_logprobs(sharp_model(), IDS)
    for (name, one), two, three in zip(
        model.named_parameters(), again.parameters(), other.parameters(), strict=True
    ):
        assert torch.equal(one, two)
        assert torch.equal(one, three) is not name.endswith("lora_A.default.weight")


def test_only_adapters_are_trained_and_saved():
    model = adapted()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    backend = backend_of(model)
    losses = [backend.step(rows(), likelihood).metrics["loss"][0] for _ in range(5)]
    assert losses[-1] < 0.9 * losses[0]
    assert backend.has_adapter
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) is not is_adapter(name), name
    state = backend.state_dict()
    assert state["model"]
    assert all(map(is_adapter, state["model"]))
    resumed = backend_of(adapted(seed=9))
    resumed.load_state_dict(copy.deepcopy(state))
    for each in (backend, resumed):
        each.step(rows(), likelihood)
    for (name, one), (_, other) in zip(backend.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other), name


def test_exported_weights_are_the_models_names_with_adapters_added():
    model = adapted()
    backend = backend_of(model)
    backend.step(rows(), likelihood)
    plain = sharp_model()
    assert [name for name, _ in backend.export()] == [name for name, _ in plain.named_parameters()]
    merged = twin_of(model)
    assert type(merged) is type(plain)
    assert not any(map(is_adapter, dict(merged.named_parameters())))
    assert reference_logprobs(merged, IDS) == pytest.approx(reference_logprobs(model, IDS), abs=1e-5)
    assert reference_logprobs(merged, IDS) != pytest.approx(reference_logprobs(plain, IDS), abs=1e-2)


def test_the_reference_is_the_model_with_adapters_off_or_as_they_were():
    model = adapted()
    backend = backend_of(model)
    base = PolicyWithoutAdapters(ForwardPass(PolicyHead(model, 1.0), 64), warm=False)
    start = backend.forward(rows())
    backend.step(rows(), likelihood)
    warm = PolicyWithoutAdapters(ForwardPass(PolicyHead(model, 1.0), 64), warm=True)
    warmed = backend.forward(rows())
    for _ in range(2):
        backend.step(rows(), likelihood)
    for reference, expected in ((base, start), (warm, warmed)):
        for one, other in zip(reference.forward(rows()), expected, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    # The policy is as before, and goes on being trained.
    assert backend.forward(rows())[0].sum() > warmed[0].sum()
    assert backend.step(rows(), likelihood).gradient_norm > 0
    resumed = PolicyWithoutAdapters(ForwardPass(PolicyHead(adapted(), 1.0), 64), warm=True)
    resumed.load_state_dict(warm.state_dict())
    torch.testing.assert_close(resumed.forward(rows())[0], warmed[0], atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="other adapters"):
        base.load_state_dict(warm.state_dict())


def test_a_critic_trains_adapters_of_its_own():
    model = adapted()
    critic = ValueModel(model)
    add_lora(critic.body, LORA, seed=3)
    backend = TorchBackend(ValueHead(critic), OptimizerSettings(), SCHEDULE)
    policy = {name: parameter.clone() for name, parameter in model.named_parameters()}

    def error(micro):
        return ((micro.outputs - 1.0).square() * micro.mask).mean(), {}

    for _ in range(2):
        assert backend.step(rows(), error).gradient_norm > 0
    names = set(backend.state_dict()["model"])
    assert {"head.weight", "head.bias"} < names
    assert all(is_adapter(name) or name.startswith("head.") for name in names)
    assert all(torch.equal(policy[name], parameter) for name, parameter in model.named_parameters())


def test_a_saved_adapter_is_pefts_own_and_a_merged_model_needs_none(tmp_path):
    model = adapted()
    backend = backend_of(model)
    backend.step(rows(), likelihood)
    expected = reference_logprobs(model, IDS)
    backend.save_adapter(tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(sharp_model(), tmp_path / "adapter")
    assert reference_logprobs(loaded, IDS) == pytest.approx(expected, abs=1e-5)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 8.0)
    assert set(config["target_modules"]) >= {"q_proj", "down_proj"}
    again = adapted(seed=7)
    load_adapter(again, tmp_path / "adapter")
    assert reference_logprobs(again, IDS) == expected
    with pytest.raises(ConfigError, match="adapters of another model"):
        load_adapter(adapted(LoraSettings(rank=2)), tmp_path / "adapter")
    backend.save(tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert reference_logprobs(merged, IDS) == pytest.approx(expected, abs=1e-5)


@pytest.mark.filterwarnings("error:`past_key_values`:FutureWarning")
@pytest.mark.parametrize("shared", [True, False])
async def test_the_engine_samples_with_the_adapters(shared):
    model = adapted()
    backend = backend_of(model)
    async with TorchEngine(model, max_rows=4, max_length=48, shares_weights=shared) as engine:
        async with engine.standing_still():
            await asyncio.to_thread(backend.step, rows(), likelihood)
            await engine.sync(BackendWeights(backend), version=1)
        (reply,) = await engine.generate_together([GenerationRequest("r", IDS, SamplingParams(6), seed=4)])
    expected = reference_logprobs(model, IDS + reply.token_ids)[len(IDS) - 1 :]
    assert reply.logprobs == pytest.approx(expected, abs=1e-5)
    assert set(reply.policy_versions) == {1}


def test_layers_that_are_not_there_are_refused():
    with pytest.raises(ConfigError, match=r"model\.lora\.target_modules: .*no_such_layer"):
        adapted(LoraSettings(target_modules=["no_such_layer"]))


def test_adapters_of_experts_are_refused_and_all_linear_leaves_them_out():
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=16, moe_intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    add_lora(model, LORA, 0)
    adapters = [name for name, _ in model.named_parameters() if is_adapter(name)]
    assert adapters
    assert all("self_attn" in name for name in adapters)
    with pytest.raises(ConfigError, match="adapters of experts"):
        add_lora(
            AutoModelForCausalLM.from_config(config), LoraSettings(target_modules=["gate_proj", "up_proj"]), 0
        )


# Full rank. With scale s = alpha / rank, a layer computes W + s B A. If A has orthonormal columns (so rank >= width
# and A^T A = 1) and stays, then a step of gradient descent of rate r / s^2 on B changes the layer's weight by
#   s (-(r / s^2) s G A^T) A = -r G,
# G being the gradient at the layer's weight: what a step of rate r on W itself does. B starts at zero, so the first
# step holds with A trained, too: its gradient s B^T G is zero. AdamW scales each number's gradient by itself, and so
# depends on the coordinates: there is no such equality for it.
RANK, ALPHA = 64, 128.0
RATE = 0.02


def linear_layers(model):
    return {name for name, _ in model.named_parameters() if "_proj" in name}


@pytest.mark.parametrize(("steps", "train_both"), [(3, False), (1, True)])
def test_adapters_of_full_rank_train_as_the_weights_themselves(steps, train_both):
    scale = ALPHA / RANK
    full, lora = sharp_model(), adapted(LoraSettings(rank=RANK, alpha=ALPHA))
    for name, parameter in full.named_parameters():
        parameter.requires_grad_("_proj" in name)
    with torch.no_grad():
        for name, parameter in lora.named_parameters():
            if "lora_A" in name:
                parameter.copy_(torch.linalg.qr(torch.randn_like(parameter)).Q)
                parameter.requires_grad_(train_both)
    backends = backend_of(full), backend_of(lora)
    backends[0]._optimizer = torch.optim.SGD(backends[0]._masters.trained, RATE)
    backends[1]._optimizer = torch.optim.SGD(backends[1]._masters.trained, RATE / scale**2)
    backends[0]._schedule = Schedule(RATE, 0, 1, "constant")
    backends[1]._schedule = Schedule(RATE / scale**2, 0, 1, "constant")
    start = dict(parameters_of(sharp_model()))
    for _ in range(steps):
        for backend in backends:
            backend.step(rows(), likelihood)
    weights = [dict(backend.parameters()) for backend in backends]
    for name in linear_layers(full):
        change = weights[0][name] - start[name]
        assert change.abs().max() > 1e-4, name
        torch.testing.assert_close(weights[1][name] - start[name], change, atol=2e-5, rtol=2e-3, msg=name)
    for one, other in zip(backends[0].forward(rows()), backends[1].forward(rows()), strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_a_folder_in_several_files_is_loaded_whole(tmp_path):
    model = adapted()
    backend_of(model).step(rows(), likelihood)
    save_weights(model, tmp_path, shard_bytes=4_000)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 2
    names = [name for file in files for name in load_file(file)]
    assert sorted(names) == sorted(name for name, _ in sharp_model().named_parameters())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert reference_logprobs(loaded, IDS) == pytest.approx(reference_logprobs(model, IDS), abs=1e-5)
    # One file in place of several leaves none of them behind.
    save_weights(model, tmp_path)
    assert [file.name for file in tmp_path.glob("*.safetensors*")] == ["model.safetensors"]
