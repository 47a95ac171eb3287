"""How a causal language model makes logits of its hidden states: always by its own code.

Many families do more after the last layer than multiply by the output embedding: Granite divides the logits, Gemma-2
caps them softly, Cohere scales them. Logits that are computed outside the model's code give other log-probabilities.

Which families cannot be computed in parts is told by their settings, or by what their code raises at a trial.
"""

import copy
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.models.pictures import ImageTensors, tokens_or_embeddings

UNLIKE = (
    AssertionError,
    AttributeError,
    IndexError,
    KeyError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Errors of a model's code that treats its inputs differently from other families."""


def why_not_by_keys_and_values(config: Any) -> str | None:
    """Return why tokens cannot be computed from keys, values and positions of those before them, or None if they may.

    Args:
        config: The settings of the text part of a model.
    """
    kinds = set(getattr(config, "layer_types", None) or ())
    if odd := sorted(kinds - {"full_attention", "sliding_attention"}):
        return f"it has layers of the kind {odd[0]}, whose state is more than keys and values"
    if lengthy := sorted(_rope_types(config) & {"dynamic", "longrope"}):
        return f"its positions ({lengthy[0]}) depend on how long the row is"
    return None


def why_no_cache_of_its_own(config: Any) -> str | None:
    """Return the same for layers that must also have keys and values of their own."""
    if getattr(config, "num_kv_shared_layers", 0):
        return "its layers share keys and values with each other"
    return why_not_by_keys_and_values(config)


def _rope_types(config: Any) -> set[str]:
    parameters = getattr(config, "rope_parameters", None) or {}
    by_layer = [each for each in parameters.values() if isinstance(each, dict)] or [parameters]
    return {str(each.get("rope_type", "default")) for each in by_layer}


class _States(MoeModelOutputWithPast):
    """Hidden states, and nothing of what else the body of one family or another returns."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


class _Given(nn.Module):
    """Stands in for a model's body: what it is given as embeddings are the hidden states."""

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> MoeModelOutputWithPast:
        return _States(last_hidden_state=inputs_embeds)


class LanguageHead:
    """Logits of some hidden states, by the model's own forward with its body taken out.

    So a long row's logits can be computed in parts, with any family's transformation: the tokens' logits do not depend
    on each other.

    Args:
        model: A causal language model. Its weights are shared, not copied.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        # A second shell around the same modules except one: other users of the model see no difference.
        self._shell = copy.copy(model)
        self._shell._modules = {
            name: _Given() if module is model.base_model else module
            for name, module in model._modules.items()
        }
        # What wrappers hang onto the model's calls later is about the model, and not about its head alone.
        for hooks in [name for name in vars(model) if "_hooks" in name]:
            setattr(self._shell, hooks, type(getattr(model, hooks))())

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits `[n, vocabulary]` of hidden states `[n, width]`."""
        logits: Tensor = self._shell(inputs_embeds=hidden[None], use_cache=False).logits
        return logits[0]

    @torch.no_grad()
    def is_whole(self) -> bool:
        """Whether head and body make the logits of the model's own forward, and nothing else has a part in them."""
        embedding = self._model.get_output_embeddings()
        if embedding is None or self._model.base_model is self._model:
            return False
        positions = torch.arange(8, device=self._model.device)
        ids = (positions * 7 + 3)[None] % embedding.weight.shape[0]
        own = self._model(input_ids=ids, use_cache=False).logits[0]
        try:
            body = self._model.base_model(input_ids=ids, use_cache=False)
            apart = self.logits(body.last_hidden_state[0])
        except torch.OutOfMemoryError:
            raise
        except UNLIKE:
            # It reads more of its body than the last hidden states, or calls a part of it.
            return False
        # The same operations on the same numbers; only the shapes that kernels are chosen by may differ.
        return apart.shape == own.shape and torch.allclose(
            apart.float(), own.float(), rtol=2e-2 if own.dtype == torch.bfloat16 else 1e-4, atol=1e-3
        )


def state_width(model: PreTrainedModel) -> int:
    """Return how many numbers a last hidden state has: what the output embedding multiplies.

    Mostly `hidden_size`; OPT-350m's states are narrower than its layers.

    Raises:
        ConfigError: If the model has no output embedding.
    """
    embedding = model.get_output_embeddings()
    if embedding is None:
        raise ConfigError(
            f"model.path: {type(model).__name__} has no output embedding, so it is no language model that can be "
            "trained here: take another model"
        )
    return int(embedding.weight.shape[1])


def check_positions(model: PreTrainedModel, max_length: int) -> None:
    """Refuse rows that are longer than a table of positions, as GPT-2's, OPT's and MPT's are.

    Positions that are rotations have no end, regardless of a model's training lengths.

    Args:
        model: A causal language model.
        max_length: Longest row in tokens.

    Raises:
        ConfigError: If its positions end before that.
    """
    config = model.config.get_text_config()
    if getattr(config, "rope_parameters", None):
        return
    last = getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None)
    if isinstance(last, int) and last < max_length:
        raise ConfigError(
            f"model.max_length {max_length}: {type(model).__name__} has {last} positions: set model.max_length={last}, "
            "or less"
        )


def own_logits(
    model: PreTrainedModel, ids: Tensor, row: Tensor, column: Tensor, images: ImageTensors | None = None
) -> Tensor:
    """Return the logits of the model's own forward at some positions, `[n, vocabulary]`.

    Args:
        model: A causal language model.
        ids: Padded token ids, `[rows, tokens]`.
        row: Rows of the positions, `[n]`.
        column: Their columns, `[n]`.
        images: Pictures among the tokens.
    """
    given = tokens_or_embeddings(model, ids, images)
    if not keeps_logits(model):
        return model(**given, use_cache=False).logits[row, column]
    columns, index = torch.unique(column, return_inverse=True)
    return model(**given, use_cache=False, logits_to_keep=columns).logits[row, index]


def keeps_logits(model: PreTrainedModel) -> bool:
    """Whether the forward can be asked for the logits of some columns only."""
    return "logits_to_keep" in inspect.signature(model.forward).parameters


def cache_argument(model: PreTrainedModel) -> str:
    """Return what the forward calls the keys and values that it continues from; later releases have another name."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
