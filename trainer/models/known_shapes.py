"""Configurations of some models of the hub, as their config.json has them: a plan of them needs no network."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any


def _qwen2(
    hidden: int, feed_forward: int, layers: int, heads: int, kv: int, *, vocabulary: int, tied: bool
) -> dict[str, Any]:
    return {
        "model_type": "qwen2",
        "hidden_size": hidden,
        "intermediate_size": feed_forward,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
    }


_BY_SIZE: Mapping[str, dict[str, Any]] = {
    "Qwen/Qwen2.5-0.5B": _qwen2(896, 4864, 24, 14, 2, vocabulary=151936, tied=True),
    "Qwen/Qwen2.5-1.5B": _qwen2(1536, 8960, 28, 12, 2, vocabulary=151936, tied=True),
    "Qwen/Qwen2.5-3B": _qwen2(2048, 11008, 36, 16, 2, vocabulary=151936, tied=True),
    "Qwen/Qwen2.5-7B": _qwen2(3584, 18944, 28, 28, 4, vocabulary=152064, tied=False),
    "Qwen/Qwen2.5-14B": _qwen2(5120, 13824, 48, 40, 8, vocabulary=152064, tied=False),
    "Qwen/Qwen2.5-32B": _qwen2(5120, 27648, 64, 40, 8, vocabulary=152064, tied=False),
    "Qwen/Qwen3-30B-A3B": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
    },
}

# Those that are trained to follow instructions have the sizes of their base.
KNOWN: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {**_BY_SIZE, **{f"{name}-Instruct": shape for name, shape in _BY_SIZE.items() if "Qwen2.5" in name}}
)
"""config.json by the name on the hub."""

TINY_VOCABULARY = 897
"""Tokens of the tiny policy's tokenizer."""


def tiny_config(hidden: int, layers: int, heads: int) -> dict[str, Any]:
    """Return the configuration of the tiny policy of these sizes."""
    return {
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": hidden // heads,
        "vocab_size": TINY_VOCABULARY,
        "tie_word_embeddings": True,
    }
