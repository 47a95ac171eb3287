"""The sizes of a causal language model, read from its config.json: no weights, no torch.

Counts hold for decoders of the families that are trained here (Llama, Mistral and Mixtral, Qwen2, Qwen3 and its
mixtures of experts, Gemma-2 and 3, Granite): gated feed-forward layers, grouped-query attention, RMS norms.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Self

from rollgym.trainer.core.errors import ConfigError

_FOUR_NORMS = frozenset({"gemma2", "gemma3", "gemma3_text"})
_NORMS_OF_HEADS = frozenset({"qwen3", "qwen3_moe", "gemma3", "gemma3_text"})
_FAMILIES = _FOUR_NORMS | _NORMS_OF_HEADS | {"qwen2", "llama", "mistral", "mixtral", "granite"}
_TIED_BY_DEFAULT = frozenset({"gemma2", "gemma3", "gemma3_text"})


@dataclass(frozen=True, slots=True)
class Parameters:
    """Numbers of parameters by what they do.

    Attributes:
        embedding: The input embedding; with a tied head it is the output's too.
        head: The output embedding; 0 if it is tied.
        attention: Projections of all layers.
        feed_forward: Dense feed-forward layers.
        experts: Experts of which each token takes some.
        router: The layers that choose the experts.
        norms: Norms and other small weights.
    """

    embedding: int
    head: int
    attention: int
    feed_forward: int
    experts: int
    router: int
    norms: int

    @property
    def total(self) -> int:
        """All of them; tied weights count once."""
        return (
            self.embedding
            + self.head
            + self.attention
            + self.feed_forward
            + self.experts
            + self.router
            + self.norms
        )

    @property
    def dense(self) -> int:
        """Return the parameters outside the experts."""
        return self.total - self.experts


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model's sizes.

    Attributes:
        vocabulary: Rows of the embedding.
        hidden: Width.
        layers: Depth.
        heads: Attention heads.
        key_value_heads: Heads of keys and values.
        head_size: Width of a head.
        feed_forward: Width of a dense feed-forward layer.
        tied: Whether input and output embedding are one.
        sparse_layers: Layers that have experts in place of a dense feed-forward.
        experts: Experts of such a layer.
        experts_per_token: Number of experts that process a token.
        expert_width: Width of an expert.
        biased: Whether queries, keys and values have biases.
        output_biased: Whether the attention's output has one.
        norms_of_heads: Whether queries and keys are normalised.
        norms_per_layer: Norms over the width in a layer.
    """

    vocabulary: int
    hidden: int
    layers: int
    heads: int
    key_value_heads: int
    head_size: int
    feed_forward: int
    tied: bool
    sparse_layers: int = 0
    experts: int = 0
    experts_per_token: int = 0
    expert_width: int = 0
    biased: bool = False
    output_biased: bool = False
    norms_of_heads: bool = False
    norms_per_layer: int = 2

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Read a config.json.

        Raises:
            ConfigError: If it is of a family that is not known here, or lacks a size.
        """
        config = config.get("text_config") or config
        family = config.get("model_type", "")
        if family not in _FAMILIES:
            raise ConfigError(f"the sizes of a model of type '{family}' are not known here")
        try:
            return cls._read(config, family)
        except (KeyError, TypeError, ZeroDivisionError) as error:
            raise ConfigError(f"the model's config.json lacks a size: {error}") from error

    @classmethod
    def _read(cls, config: Mapping[str, Any], family: str) -> Self:
        layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
        experts = config.get("num_experts") or config.get("num_local_experts") or 0
        step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or ()
        sparse = [layer for layer in range(layers) if layer not in dense and (layer + 1) % step == 0]
        bias = bool(config.get("attention_bias")) and family != "qwen2"
        return cls(
            vocabulary=config["vocab_size"],
            hidden=config["hidden_size"],
            layers=layers,
            heads=heads,
            key_value_heads=config.get("num_key_value_heads") or heads,
            head_size=config.get("head_dim") or config["hidden_size"] // heads,
            feed_forward=config["intermediate_size"],
            tied=bool(config.get("tie_word_embeddings", family in _TIED_BY_DEFAULT)),
            sparse_layers=len(sparse) if experts else 0,
            experts=experts,
            experts_per_token=config.get("num_experts_per_tok") or 0 if experts else 0,
            expert_width=(config.get("moe_intermediate_size") or config["intermediate_size"])
            if experts
            else 0,
            biased=family == "qwen2" or bias,
            output_biased=bias,
            norms_of_heads=family in _NORMS_OF_HEADS,
            norms_per_layer=4 if family in _FOUR_NORMS else 2,
        )

    @property
    def query_width(self) -> int:
        """Width of all heads together."""
        return self.heads * self.head_size

    @property
    def key_width(self) -> int:
        """Width of all heads of keys (or values) together."""
        return self.key_value_heads * self.head_size

    @property
    def parameters(self) -> Parameters:
        """How many parameters there are, by what they do."""
        attention = self.hidden * (2 * self.query_width + 2 * self.key_width)
        attention += (self.query_width + 2 * self.key_width) * self.biased + self.hidden * self.output_biased
        norms = self.norms_per_layer * self.hidden + 2 * self.head_size * self.norms_of_heads
        dense_layers = self.layers - self.sparse_layers
        return Parameters(
            embedding=self.vocabulary * self.hidden,
            head=0 if self.tied else self.vocabulary * self.hidden,
            attention=self.layers * attention,
            feed_forward=dense_layers * 3 * self.hidden * self.feed_forward,
            experts=self.sparse_layers * self.experts * 3 * self.hidden * self.expert_width,
            router=self.sparse_layers * self.hidden * self.experts,
            norms=self.layers * norms + self.hidden,
        )

    @property
    def cache_numbers_per_token(self) -> int:
        """Keys and values that an engine keeps of a token, as numbers."""
        return 2 * self.layers * self.key_width

    @property
    def matrices_per_token(self) -> int:
        """Weights that a token is multiplied with on its way through the layers: of experts, those that it takes."""
        parts = self.parameters
        taken = parts.experts * self.experts_per_token // self.experts if self.experts else 0
        return parts.attention + parts.feed_forward + parts.router + taken


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
