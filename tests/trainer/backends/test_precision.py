"""Where models are computed and in what numbers: rounded weights with masters in float32, devices, checkpointing."""

import ast
import asyncio
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rollgym.trainer.algorithms.aggregation import collect
from rollgym.trainer.backends import torch_backend
from rollgym.trainer.backends.base import TrainRow
from rollgym.trainer.backends.heads import PolicyHead, ValueHead
from rollgym.trainer.backends.torch_backend import Schedule, TorchBackend
from rollgym.trainer.config.optimizer import OptimizerSettings
from rollgym.trainer.core.device import torch_device
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.inference.base import GenerationRequest, SamplingParams
from rollgym.trainer.inference.engine.torch_engine import TorchEngine
from rollgym.trainer.learn.weights.publisher import BackendWeights
from rollgym.trainer.models.load import load_model
from rollgym.trainer.models.value_head import ValueModel
from rollgym.trainer.models.weights import without_chance
from tests.support.tiny_models import reference_logprobs, sharp_model

ROOT = Path(__file__).resolve().parents[3]
IDS = [3, 9, 17, 4, 30, 22, 8]


def backend_of(dtype, *, rate=1e-3, checkpointing=False, budget=10_000, seed=0):
    settings = OptimizerSettings(tokens_per_micro_batch=budget)
    return TorchBackend(
        PolicyHead(sharp_model(seed), 1.0),
        settings,
        Schedule(rate, 0, 10, "constant"),
        dtype=dtype,
        gradient_checkpointing=checkpointing,
    )


def rows():
    mask = torch.tensor([False, *[True] * (len(IDS) - 1)])
    return [TrainRow(torch.tensor(IDS), mask), TrainRow(torch.tensor(IDS[::-1]), mask)]


def likelihood(micro):
    loss = -(micro.outputs * micro.mask).sum() / 12
    return loss, collect({"loss": (loss, torch.ones(()))})


def losses_of(backend, steps):
    return [backend.step(rows(), likelihood).metrics["loss"][0] for _ in range(steps)]


def test_bf16_trains_and_stays_near_fp32():
    wide, narrow = backend_of(torch.float32), backend_of(torch.bfloat16)
    expected, got = losses_of(wide, 20), losses_of(narrow, 20)
    assert expected[-1] < 0.7 * expected[0]
    assert got == pytest.approx(expected, rel=0.05, abs=0.05)
    assert {tensor.dtype for _, tensor in narrow.export()} == {torch.bfloat16}
    for (name, rounded), (_, other) in zip(narrow.export(), wide.export(), strict=True):
        torch.testing.assert_close(rounded.float(), other, atol=0.02, rtol=0.02, msg=name)


def test_steps_too_small_for_bf16_add_up_in_the_masters():
    """A hundred steps of a rate that no weight of 0.1 or more could take in eight bits."""
    backend = backend_of(torch.bfloat16, rate=1e-5)
    before = {name: tensor.clone() for name, tensor in backend.state_dict()["model"].items()}
    rounded = {name: tensor.clone() for name, tensor in backend.parameters()}
    for _ in range(100):
        backend.step(rows(), likelihood)
    after = backend.state_dict()["model"]
    assert {tensor.dtype for tensor in after.values()} == {torch.float32}
    moved = torch.cat([(after[name] - before[name]).abs().flatten() for name in before])
    assert moved.median() > 5e-4, "Adam's steps of a gradient that points one way add up to rate times steps"
    # The model computes with the masters, rounded: never with weights of its own.
    for name, tensor in backend.parameters():
        assert torch.equal(tensor, after[name].bfloat16()), name
    assert any(not torch.equal(tensor, rounded[name]) for name, tensor in backend.parameters())


@pytest.mark.parametrize("budget", [7, 10_000])
def test_gradients_of_micro_batches_add_up_in_fp32(budget):
    backend = backend_of(torch.bfloat16, budget=budget)
    norm = backend.step(rows(), likelihood).gradient_norm
    assert norm == pytest.approx(backend_of(torch.float32).step(rows(), likelihood).gradient_norm, rel=0.05)
    assert all(parameter.grad is None for parameter in backend._head.model.parameters())


def test_gradients_move_to_the_masters_together_as_they_do_one_by_one(monkeypatch):
    """And those that a loss which fails has left behind are in none of the next step."""
    found = []
    for numbers in (1, 200, 2**25):
        monkeypatch.setattr(torch_backend, "_NUMBERS_TOGETHER", numbers)
        backend = backend_of(torch.bfloat16, budget=7)

        def failing(micro, seen=[]):  # noqa: B006
            seen.append(micro)
            if len(seen) % 2 == 0:
                raise ValueError("of no use")
            return likelihood(micro)

        with pytest.raises(ValueError, match="of no use"):
            backend.step(rows(), failing)
        losses_of(backend, 3)
        found.append(backend.state_dict()["model"])
    for name, one in found[0].items():
        assert torch.equal(one, found[1][name]), name
        assert torch.equal(one, found[2][name]), name
    fresh = backend_of(torch.bfloat16, budget=7)
    losses_of(fresh, 3)
    assert all(torch.equal(one, found[0][name]) for name, one in fresh.state_dict()["model"].items())


def test_a_checkpoint_of_bf16_holds_the_masters_and_goes_on_exactly():
    straight, first = backend_of(torch.bfloat16), backend_of(torch.bfloat16)
    for backend in (straight, first):
        losses_of(backend, 2)
    resumed = backend_of(torch.bfloat16, seed=5)
    resumed.load_state_dict(first.state_dict())
    losses_of(straight, 2), losses_of(resumed, 2)
    for (name, one), other in zip(
        straight.state_dict()["model"].items(), resumed.state_dict()["model"].values(), strict=True
    ):
        assert torch.equal(one, other), name
    # Whoever trains the model next begins with the masters, not with what they were rounded to.
    masters = {name: tensor.clone() for name, tensor in straight.state_dict()["model"].items()}
    straight.release()
    for name, parameter in straight._head.model.named_parameters():
        assert torch.equal(parameter, masters[name])


@pytest.mark.parametrize("shared", [True, False])
async def test_engine_and_training_share_the_rounded_weights(shared):
    backend = backend_of(torch.bfloat16)
    model = backend._head.model
    async with TorchEngine(model, max_rows=4, max_length=48, shares_weights=shared) as engine:
        async with engine.standing_still():
            await asyncio.to_thread(backend.step, rows(), likelihood)
            await engine.sync(BackendWeights(backend), version=1)
        assert engine._model.dtype is torch.bfloat16
        (reply,) = await engine.generate_together([GenerationRequest("r", IDS, SamplingParams(8), seed=4)])
    expected = reference_logprobs(model, IDS + reply.token_ids)[len(IDS) - 1 :]
    assert reply.logprobs == pytest.approx(expected, abs=0.1)


def test_a_critics_values_are_numbers_of_fp32():
    head = ValueHead(ValueModel(sharp_model()))
    backend = TorchBackend(head, OptimizerSettings(), Schedule(1e-2, 0, 1, "constant"), dtype=torch.bfloat16)

    def error(micro):
        loss = ((micro.outputs - 0.3).square() * micro.mask).sum() / 12
        return loss, collect({"error": (loss, torch.ones(()))})

    errors = [backend.step(rows(), error).metrics["error"][0] for _ in range(30)]
    assert errors[-1] < 0.1 * errors[0]
    assert head.model.head.weight.dtype is torch.float32
    assert head.model.body.dtype is torch.bfloat16
    assert backend.forward(rows())[0].dtype is torch.float32


def test_activations_computed_once_more_give_the_same_update():
    plain, again = backend_of(torch.float32), backend_of(torch.float32, checkpointing=True)
    layers = []
    for layer in again._head.model.model.layers:
        layer.self_attn.register_forward_hook(lambda *_: layers.append(1))
    again.step(rows(), likelihood)
    assert len(layers) == 4, "two layers, once forward and once more for the gradient"
    plain.step(rows(), likelihood)
    for (name, one), (_, other) in zip(plain.export(), again.export(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5, msg=name)
    layers.clear()
    again.forward(rows())
    assert len(layers) == 2


def test_chance_is_taken_out_of_models():
    config = LlamaConfig(
        vocab_size=20, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        attention_dropout=0.5,
    )  # fmt: skip
    model = without_chance(LlamaForCausalLM(config)).train()
    with torch.no_grad():
        first, second = (model(torch.tensor([[3, 4, 5]])).logits for _ in range(2))
    assert torch.equal(first, second)


def test_an_engine_of_its_own_needs_no_second_copy_of_the_weights_to_take_new_ones():
    """Weights are read one after the other: what is asked for next is not made before the last one was taken."""
    backend = backend_of(torch.float32)
    model = backend._head.model

    class Counting(BackendWeights):
        def parameters(self):
            for name, tensor in super().parameters():
                assert tensor.data_ptr() in own, "the backend's own tensor, and no copy of it"
                yield name, tensor

    own = {parameter.data_ptr() for parameter in model.parameters()}

    async def taken():
        async with TorchEngine(model, max_rows=1, max_length=8) as engine:
            await engine.sync(Counting(backend), 1)
            return {parameter.data_ptr() for parameter in engine._model.parameters()}

    assert not asyncio.run(taken()) & own


def test_auto_is_the_processor_where_there_is_no_accelerator(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    assert torch_device("auto") == torch_device("cpu") == torch.device("cpu")
    with pytest.raises(ConfigError, match=r"model\.device xpu:1: torch finds no accelerator here"):
        torch_device("xpu:1")


def test_the_accelerator_that_torch_finds_is_taken_whatever_its_kind(monkeypatch):
    found = torch.device("xpu")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: found)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert torch_device("auto") == found
    assert torch_device("xpu:1") == torch.device("xpu:1")
    assert torch_device("cpu") == torch.device("cpu")
    with pytest.raises(ConfigError, match="there are 2 devices of that type, counted from 0"):
        torch_device("xpu:2")
    with pytest.raises(ConfigError, match="torch finds only xpu here"):
        torch_device("npu")


def test_no_kind_of_accelerator_is_named():
    """Whatever torch knows as its accelerator works: no module calls one of them by its name."""
    kinds = {"cuda", "mps", "xpu", "npu", "hpu", "rocm", "hip"}
    named = [
        f"{file}:{node.lineno}"
        for file in sorted((ROOT / "trainer").rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if (isinstance(node, ast.Attribute) and node.attr in kinds)
        or (isinstance(node, ast.Constant) and str(node.value).split(":")[0] in kinds)
    ]
    assert named == []


def test_an_attention_that_cannot_be_had_is_refused_by_its_name(tmp_path):
    sharp_model().save_pretrained(tmp_path)
    assert load_model(tmp_path, attention="eager").config._attn_implementation == "eager"
    assert load_model(tmp_path, torch.bfloat16).dtype is torch.bfloat16
    with pytest.raises(ConfigError, match=r"model\.attention no_such_attention: "):
        load_model(tmp_path, attention="no_such_attention")
