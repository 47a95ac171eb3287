"""Tiny models of older families: all that keep keys and values in every layer start, others say why not."""

import asyncio
import json

import pytest
import torch
from transformers import BartConfig

from rollgym.trainer.backends.base import TrainRow
from rollgym.trainer.backends.heads import LogitsReader, PolicyHead, ValueHead
from rollgym.trainer.backends.layers import GradientCheckpointing
from rollgym.trainer.backends.torch_backend import Schedule, TorchBackend
from rollgym.trainer.config.load import load_settings
from rollgym.trainer.config.model import LoraSettings
from rollgym.trainer.config.optimizer import OptimizerSettings
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.inference.engine.torch_engine import TorchEngine
from rollgym.trainer.models.lora import add_lora, is_adapter
from rollgym.trainer.models.value_head import ValueModel
from rollgym.trainer.models.weights import twin_of
from rollgym.trainer.run.learning import learn
from rollgym.trainer.run.policy import build_policy
from rollgym.trainer.run.probe import probe_log_probabilities
from tests.support.chat_templates import trained_tokenizer
from tests.support.current_families import PROMPTS, replies_of, words_of
from tests.support.model_families import KEYED, KEYLESS, VOCABULARY, config_of, random_model
from tests.support.processes import env_server
from tests.support.tiny_models import reference_logprobs


def model_of(family, **more):
    return random_model(config_of(family, **more), torch.float32)


def rows_of(prompts, replies):
    for prompt, reply in zip(prompts, replies, strict=True):
        mask = [False] * len(prompt) + [True] * len(reply)
        yield TrainRow(torch.tensor([*prompt, *reply]), torch.tensor(mask))


_FAST = {
    "gpt2",
    "gpt_neo",
    "gptj",
    "opt",
    "opt: narrow",
    "bloom",
    "falcon: alibi",
    "mpt",
    "phimoe",
    "llama4_text",
}
_SAMPLE = [each if each in _FAST else pytest.param(each, marks=pytest.mark.slow) for each in KEYED]


@pytest.mark.parametrize("family", _SAMPLE)
async def test_engine_training_and_own_forward_agree(family):
    model = model_of(family)
    prompts = [*PROMPTS, [*PROMPTS[0], 7]]  # rows that begin alike are computed together
    replies = await replies_of(model, prompts, temperature=0.7)
    # A vocabulary's worth of logits at once is less than a row has: they are made in parts where that can be.
    backend = TorchBackend(
        PolicyHead(model, 0.7, 5 * VOCABULARY),
        OptimizerSettings(tokens_per_micro_batch=64),
        Schedule(1e-3, 0, 1, "constant"),
    )
    trained = backend.forward(list(rows_of(prompts, [reply.token_ids for reply in replies])))
    for prompt, reply, values in zip(prompts, replies, trained, strict=True):
        own = reference_logprobs(model, prompt + reply.token_ids, 0.7)[len(prompt) - 1 :]
        assert reply.logprobs == pytest.approx(own, abs=1e-5)
        assert values[len(prompt) :].tolist() == pytest.approx(own, abs=1e-5)


@pytest.mark.parametrize("family", _SAMPLE)
def test_segments_behind_a_prefix_are_computed_exactly_or_not_at_all(family):
    reader = LogitsReader(model_of(family))
    whole = "its logits are made by its whole forward, and not of its last hidden states alone"
    assert reader.why_not_shared == (whole if family.startswith(("opt", "llama4")) else None)


def test_a_decoder_that_does_not_name_its_embedding_computes_what_it_computes_itself():
    sizes = dict.fromkeys(("d_model", "encoder_ffn_dim", "decoder_ffn_dim"), 16)
    heads = dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2)
    config = BartConfig(vocab_size=VOCABULARY, encoder_layers=1, decoder_layers=1, **sizes, **heads)
    model = random_model(config, torch.float32)
    (values,) = TorchBackend(
        PolicyHead(model, 1.0), OptimizerSettings(tokens_per_micro_batch=64), Schedule(1e-3, 0, 1, "constant")
    ).forward(list(rows_of([[5, 9, 11]], [[7, 8]])))
    assert values[3:].tolist() == pytest.approx(reference_logprobs(model, [5, 9, 11, 7, 8])[2:], abs=1e-5)


@pytest.mark.parametrize("family", KEYLESS)
def test_families_without_keys_and_values_are_refused_with_the_reason(family):
    model = model_of(family)
    with pytest.raises(
        ConfigError, match=f"keys and values in every layer, and {type(model).__name__} "
    ) as refused:
        TorchEngine(model, max_rows=4, max_length=64)
    assert str(refused.value).endswith(
        ": have an inference server sample that knows this family (inference.kind), or take another model"
    )
    # Servers know such families: training computes them as they are.
    (values,) = TorchBackend(
        PolicyHead(model, 1.0), OptimizerSettings(tokens_per_micro_batch=64), Schedule(1e-3, 0, 1, "constant")
    ).forward(list(rows_of([[5, 9, 11]], [[7, 8]])))
    assert values[3:].tolist() == pytest.approx(reference_logprobs(model, [5, 9, 11, 7, 8])[2:], abs=1e-5)


async def test_a_bidirectional_model_is_refused_with_the_numbers():
    model = model_of("bert")
    with pytest.raises(ConfigError, match="log-probabilities of BertLMHeadModel do not agree"):
        async with TorchEngine(model, max_rows=4, max_length=64) as engine:
            await probe_log_probabilities(model, engine, list(range(3, 30)), 1.0, 64)


_CHANCE = {
    "gpt2": ["resid_pdrop", "embd_pdrop", "attn_pdrop"],
    "opt": ["dropout", "attention_dropout", "layerdrop"],
    "xglm": ["dropout", "attention_dropout", "activation_dropout", "layerdrop"],
    "bloom": ["hidden_dropout", "attention_dropout"],
    "falcon": ["hidden_dropout", "attention_dropout"],
    "starcoder2": ["attention_dropout", "residual_dropout", "embedding_dropout"],
    "phimoe": ["router_jitter_noise", "input_jitter_noise"],
}


def gradients_of(model, *, checkpointed):
    model.zero_grad(set_to_none=True)
    head, checkpointing = PolicyHead(model, 1.0), GradientCheckpointing(model, enabled=checkpointed)
    ids = torch.arange(3, 43).view(2, 20) % VOCABULARY
    with checkpointing.active():
        chosen, _ = head(ids, torch.zeros(19, dtype=torch.long), torch.arange(1, 20), "none")
        chosen.sum().backward()
    return chosen.detach(), {
        name: each.grad for name, each in model.named_parameters() if each.grad is not None
    }


@pytest.mark.parametrize("family", _CHANCE)
def test_chance_has_no_part_where_activations_are_computed_again(family):
    model = twin_of(model_of(family, **dict.fromkeys(_CHANCE[family], 0.3)))
    expected, gradients = gradients_of(model, checkpointed=False)
    found, again = gradients_of(model, checkpointed=True)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    assert gradients.keys() == again.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(again[name], gradient, atol=1e-5, rtol=1e-4)


def test_a_family_that_cannot_compute_activations_again_is_refused():
    with pytest.raises(
        ConfigError, match=r"model.gradient_checkpointing: CTRLLMHeadModel does not support activation"
    ):
        GradientCheckpointing(model_of("ctrl"), enabled=True)


def test_what_a_router_reads_in_evaluation_is_no_chance():
    plain = config_of("phimoe", router_jitter_noise=0.3)
    model = random_model(plain, torch.float32)
    exact = random_model(config_of("phimoe", router_jitter_noise=0.0), torch.float32)
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        assert not torch.equal(model(ids).logits, exact(ids).logits)
        torch.testing.assert_close(twin_of(model)(ids).logits, model(ids).logits)


@pytest.mark.parametrize("family", ["opt: narrow", "gpt2", "mpt"])
def test_a_critic_is_as_wide_as_the_states_it_reads(family):
    head = ValueHead(ValueModel(model_of(family)))
    torch.nn.init.normal_(head.model.head.weight)
    ids = torch.arange(3, 23)[None]
    values, _ = head(ids, torch.zeros(19, dtype=torch.long), torch.arange(1, 20), "none")
    assert values.shape == (19,)
    assert float(values.detach().std()) > 0


def test_a_critic_of_a_family_whose_body_is_not_known_is_refused():
    with pytest.raises(ConfigError, match="Llama4ForCausalLM has no body apart from its head"):
        ValueModel(model_of("llama4_text"))


@pytest.mark.parametrize("family", ["gpt2", "bloom"])
def test_adapters_lie_beside_all_linear_layers(family):
    model = model_of(family)
    before = reference_logprobs(model, [5, 9, 11, 7, 8])
    add_lora(model, LoraSettings(rank=2), 3)
    adapted = [name for name, _ in model.named_parameters() if is_adapter(name)]
    assert len(adapted) == 2 * 4 * 2, "two factors, four layers of attention and feed-forward, twice"
    assert reference_logprobs(model, [5, 9, 11, 7, 8]) == before
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_adapter(name):
                parameter.normal_(std=0.2)
    changed = reference_logprobs(model, [5, 9, 11, 7, 8])
    assert changed != pytest.approx(before, abs=1e-2)
    assert reference_logprobs(twin_of(model), [5, 9, 11, 7, 8]) == pytest.approx(changed, abs=1e-5)


def test_a_name_that_no_layer_has_is_refused():
    with pytest.raises(
        ConfigError, match=r"GPT2LMHeadModel has no layer q_proj; its linear layers are called c_attn, "
    ):
        add_lora(model_of("gpt2"), LoraSettings(rank=2, target_modules=["c_attn", "q_proj"]), 3)


def folder_of(family, directory, **more):
    tokenizer = trained_tokenizer("qwen2.5")
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    model = random_model(config_of(family, vocab_size=len(tokenizer), **ids, **more), torch.float32)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


@pytest.mark.parametrize("family", ["gpt2", "opt", "mpt"])
def test_rows_longer_than_the_table_of_positions_are_refused(family, tmp_path):
    folder_of(family, tmp_path)
    with pytest.raises(
        ConfigError, match=r"model.max_length 512: \w+ has 128 positions: set model.max_length=128"
    ):
        build_policy(
            load_settings(
                None, ["tasks=[{env_id: Guess-v0}]", f"model.path={tmp_path}", "model.max_length=512"]
            )
        )


@pytest.fixture(scope="module")
def url():
    with env_server() as address:
        yield address


_RUN = {"gpt2", "opt: narrow", "bloom"}
# GPT-NeoX-Japanese and CTRL cannot compute activations again, and Llama-4 has no critic.
_OTHERWISE = {
    "gpt_neox_japanese": "model.gradient_checkpointing=false",
    "ctrl": "model.gradient_checkpointing=false",
    "llama4_text": "algorithm={preset: grpo}",
}


@pytest.mark.parametrize(
    "family",
    [family if family in _RUN else pytest.param(family, marks=pytest.mark.slow) for family in KEYED],
)
def test_a_whole_run_has_ratios_of_one_and_trains(family, tmp_path, url):
    folder_of(family, tmp_path / "model", max_position_embeddings=512, max_seq_len=512)
    words = words_of(tmp_path, url, "steps=2", "model.gradient_checkpointing=true")
    words += [_OTHERWISE[family]] if family in _OTHERWISE else []
    asyncio.run(learn(load_settings(None, words), "train"))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "policy/optimizer_steps" in line]
    assert len(steps) == 2
    for line in steps:
        assert line["mismatch/k3"] == pytest.approx(0.0, abs=1e-8)
        assert line["policy/optimizer_steps"] >= 1
        # Without a critic, groups of equal returns have no gradient.
        assert line["policy/gradient_norm"] > 0 or family == "llama4_text"
