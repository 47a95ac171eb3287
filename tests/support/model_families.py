"""Configurations of tiny models of many families, by the names that transformers has for them."""

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from rollgym.trainer.models.weights import without_chance

VOCABULARY = 64
_SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_FALCON = {"head_dim": None, "num_kv_heads": 1}
# What a family calls its sizes where the common names do not reach, and what makes it unlike others.
KEYED = {
    "gpt2": {},
    "gpt_neox": {},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8, "num_layers": 2, "num_heads": 2},
    "gptj": {"rotary_dim": 8},
    "gpt_bigcode": {},
    "gpt_neox_japanese": {},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "opt: narrow": {"ffn_dim": 64, "word_embed_proj_dim": 16, "do_layer_norm_before": False},
    "bloom": {},
    "falcon": _FALCON,
    "falcon: alibi": {**_FALCON, "alibi": True},
    "falcon: new": {**_FALCON, "new_decoder_architecture": True},
    "codegen": {"rotary_dim": 8, "num_attention_heads": 4},
    "mpt": {"d_model": 32, "n_heads": 2, "n_layers": 2, "expansion_ratio": 2, "max_seq_len": 128},
    "xglm": {"d_model": 32, "attention_heads": 2, "num_layers": 2, "ffn_dim": 64},
    "biogpt": {},
    "ctrl": {"dff": 32},
    "phi": {},
    "phi3": {},
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "stablelm": {},
    "persimmon": {},
    "starcoder2": {},
    "gemma": {},
    "olmo2": {},
    "nemotron": {},
    "glm4": {},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {**_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16},
    "deepseek_v3": {
        **_EXPERTS, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "kv_lora_rank": 8, "q_lora_rank": 8,
        "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "head_dim": 8,
    },
    "llama4_text": {"num_local_experts": 2, "intermediate_size_mlp": 64},
}  # fmt: skip
"""Families that keep keys and values in every layer, by name; behind a colon, a form of one."""

KEYLESS = {
    "mamba": {"state_size": 4},
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 1, "state_size": 8},
    "rwkv": {"attention_hidden_size": 32},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "openai-gpt": {},
    "xlm": {},
}
"""Families that keep something else, or nothing, of what they have read."""


def config_of(family: str, **more):
    """The configuration of a tiny model of a family."""
    sizes = {**_SHAPE, **(KEYED.get(family) or KEYLESS.get(family) or {}), **more}
    kind = CONFIG_MAPPING[family.partition(":")[0]]
    return kind(**{name: value for name, value in sizes.items() if value is not None})


def random_model(config, dtype, scale: float = 6.0):
    """A model with weights large enough that positions, masks and routers are felt."""

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = without_chance(AutoModelForCausalLM.from_config(config, dtype=dtype))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 and float(parameter.std()) < 0.1:
                parameter.mul_(scale)
    return model
