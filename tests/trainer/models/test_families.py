"""Log-probabilities of tiny models of each family: engine, training and the model's own forward agree."""

import copy
from math import comb

import pytest
import torch
from transformers import (
    LlamaForCausalLM,
)

from rollgym.trainer.backends.base import TrainRow
from rollgym.trainer.backends.heads import PolicyHead
from rollgym.trainer.backends.torch_backend import Schedule, TorchBackend
from rollgym.trainer.config.optimizer import OptimizerSettings
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.core.numbers import least_by_no_chance
from rollgym.trainer.inference.engine.torch_engine import TorchEngine
from rollgym.trainer.models.language_head import LanguageHead
from rollgym.trainer.models.weights import place
from rollgym.trainer.run.probe import probe_log_probabilities
from tests.support.current_families import FAMILIES, PROMPTS, VOCABULARY, model_of, replies_of
from tests.support.tiny_models import reference_logprobs


@pytest.mark.filterwarnings("error:`past_key_values`:FutureWarning")
@pytest.mark.parametrize("family", FAMILIES)
async def test_engine_and_training_compute_the_models_own_log_probabilities(family):
    model = model_of(family)
    assert model.dtype is torch.float32
    for temperature in (1.0, 0.7):
        replies = await replies_of(model, PROMPTS, temperature=temperature)
        settings = OptimizerSettings(tokens_per_micro_batch=64)
        backend = TorchBackend(PolicyHead(model, temperature), settings, Schedule(1e-3, 0, 1, "constant"))
        rows = []
        for prompt, reply in zip(PROMPTS, replies, strict=True):
            mask = [False] * len(prompt) + [True] * len(reply.token_ids)
            rows.append(TrainRow(torch.tensor(prompt + reply.token_ids), torch.tensor(mask)))
        for prompt, reply, trained in zip(PROMPTS, replies, backend.forward(rows), strict=True):
            own = reference_logprobs(model, prompt + reply.token_ids, temperature)[len(prompt) - 1 :]
            assert reply.logprobs == pytest.approx(own, abs=1e-5)
            assert trained[len(prompt) :].tolist() == pytest.approx(own, abs=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_head_alone_makes_the_models_own_logits(family):
    model = model_of(family)
    head = LanguageHead(model)
    assert head.is_whole()
    ids = torch.arange(3, 23)[None]
    with torch.no_grad():
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
        torch.testing.assert_close(head.logits(hidden), model(ids).logits[0], atol=1e-5, rtol=1e-5)
    assert type(model.base_model) is not type(head._shell.base_model)


def test_a_head_that_reads_more_than_hidden_states_is_told_from_others():
    class Biased(LlamaForCausalLM):
        def forward(self, input_ids=None, **options):
            output = super().forward(input_ids=input_ids, **options)
            if input_ids is not None:
                output.logits = output.logits + input_ids[..., -output.logits.shape[1] :, None]
            return output

    model = Biased(FAMILIES["llama-3"]).eval()
    assert not LanguageHead(model).is_whole()


def logprobs_and_gradient(model, entropy, logits_at_once):
    head = PolicyHead(model, 0.8, logits_at_once)
    ids = torch.arange(3, 43).view(2, 20) % VOCABULARY
    row, column = (torch.arange(1, 20).repeat(2) < 0).long(), torch.arange(1, 20).repeat(2)
    row[19:] = 1
    model.zero_grad(set_to_none=True)
    chosen, spread = head(ids, row, column, entropy)
    loss = chosen.sum() + (0.0 if spread is None else 0.3 * spread.sum())
    loss.backward()
    return chosen.detach(), spread, [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("family", "entropy"),
    [*((family, "metric") for family in FAMILIES), ("qwen3", "none"), ("qwen3", "gradient")],
)
def test_logits_in_parts_give_the_same_numbers_and_gradients(family, entropy):
    model = model_of(family)
    whole = logprobs_and_gradient(model, entropy, 2**26)
    parts = logprobs_and_gradient(model, entropy, 7 * VOCABULARY)
    torch.testing.assert_close(parts[0], whole[0], atol=1e-6, rtol=1e-5)
    if entropy != "none":
        torch.testing.assert_close(parts[1], whole[1], atol=1e-6, rtol=1e-5)
    for mine, theirs in zip(parts[2], whole[2], strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_in_parts_are_never_held_together(family):
    model = model_of(family)
    seen = []
    model.get_output_embeddings().register_forward_hook(lambda _, __, output: seen.append(output.numel()))
    logprobs_and_gradient(model, "metric", 7 * VOCABULARY)
    # Two more, of eight tokens, are the proof that head and body make the logits.
    assert max(seen) <= 8 * VOCABULARY
    assert len(seen) == 2 + 2 * 6, "six parts, once forward and once more for the gradient"


@pytest.mark.parametrize("family", FAMILIES)
async def test_the_probe_passes_every_family(family):
    model = model_of(family)
    async with TorchEngine(model, max_rows=4, max_length=40) as engine:
        assert await probe_log_probabilities(model, engine, list(range(3, 30)), 0.9, 40) < 1e-5


class HeadOnly:
    """An engine that computes logits apart from the model's forward."""

    version = 0

    def __init__(self, model):
        self._model = model

    async def generate_together(self, requests):
        model, scaling = self._model, self._model.config.logits_scaling
        try:
            model.config.logits_scaling = 1.0
            return await replies_of(model, [request.prompt_ids for request in requests], tokens=8)
        finally:
            model.config.logits_scaling = scaling


async def test_the_probe_refuses_with_names_and_numbers():
    model = model_of("granite")
    with pytest.raises(ConfigError) as refused:
        await probe_log_probabilities(model, HeadOnly(model), [3, 4, 5, 6], 1.0, 40)
    text = str(refused.value)
    assert text.startswith("log-probabilities of GraniteForCausalLM do not agree: for token ")
    assert "the inference engine has -" in text
    assert "training -" in text
    assert "the model's own forward -" in text


def rounded(family):
    model = model_of(family)
    place(model, torch.bfloat16, torch.device("cpu"))
    return model


@pytest.mark.parametrize("family", FAMILIES)
async def test_the_probe_passes_every_family_in_bfloat16(family):
    model = rounded(family)
    async with TorchEngine(model, max_rows=4, max_length=100) as engine:
        await probe_log_probabilities(model, engine, list(range(3, 43)), 0.9, 100)


# Gemma-2 normalises what a layer's parts return: a factor of it is hardly a fault.
@pytest.mark.parametrize(
    ("family", "how"),
    [
        ("llama-3", "noise"),
        ("llama-3", "factor"),
        ("qwen3", "noise"),
        ("qwen3", "factor"),
        ("gemma-2", "noise"),
    ],
)
async def test_the_probe_finds_a_percent_in_one_layer_in_bfloat16(family, how):
    model = rounded(family)
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in other.model.layers[0].parameters():
            size = parameter.float().square().mean().sqrt()
            noise = torch.randn(parameter.shape, generator=generator) * size
            parameter.add_(0.01 * (noise if how == "noise" else parameter.float()))
    async with TorchEngine(other, max_rows=4, max_length=100) as engine:
        with pytest.raises(ConfigError, match="do not agree"):
            await probe_log_probabilities(model, engine, list(range(3, 43)), 0.9, 100)


@pytest.mark.parametrize(("tokens", "least"), [(0, 1), (8, 9), (24, 24), (64, 53)])
def test_no_more_than_chance_allows_refuses_a_run(tokens, least):
    assert least_by_no_chance(tokens) == least
    if least <= tokens:
        tail = [
            sum(comb(tokens, more) for more in range(at, tokens + 1)) / 2**tokens for at in (least - 1, least)
        ]
        assert tail[1] <= 1e-7 < tail[0]


@pytest.mark.parametrize("build", [model_of, rounded])
async def test_the_probe_refuses_what_is_no_number(build):
    model = build("llama-3")
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    async with TorchEngine(model, max_rows=4, max_length=40) as engine:
        with pytest.raises(ConfigError, match="do not agree"):
            await probe_log_probabilities(model, engine, [3, 4, 5, 6], 1.0, 40)
