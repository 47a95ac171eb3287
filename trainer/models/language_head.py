"""How a causal language model makes logits of its hidden states: always its own forward, or a proof that it is plain.

Many families do more after the last layer than multiply by the output embedding: Granite divides the logits, Gemma-2
caps them softly, Cohere scales them. Whoever computes logits apart from the forward has other log-probabilities.
"""

import inspect

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

_MAGNITUDES = (1e-2, 1.0, 1e2, 1e4)


@torch.no_grad()
def has_plain_head(model: PreTrainedModel) -> bool:
    """Whether the logits are the output embedding of the last hidden states and nothing else.

    The model's own forward is run with hidden states of many magnitudes put in place of its body's, so that a scale, a
    cap or a bias shows whatever the weights are.
    """
    embedding = model.get_output_embeddings()
    if not isinstance(embedding, nn.Linear):
        return False
    width = embedding.in_features
    waves = torch.sin(torch.arange(len(_MAGNITUDES) * width, dtype=torch.float32)).view(1, -1, width)
    hidden = (waves * torch.tensor(_MAGNITUDES)[:, None]).to(embedding.weight)

    def replaced(_: nn.Module, __: object, output: object) -> object:
        if hasattr(output, "last_hidden_state"):
            output.last_hidden_state = hidden
        return output

    hook = model.base_model.register_forward_hook(replaced)
    try:
        ids = torch.zeros(1, len(_MAGNITUDES), dtype=torch.long, device=embedding.weight.device)
        logits = model(input_ids=ids, use_cache=False).logits
    finally:
        hook.remove()
    plain = embedding(hidden)
    return logits.shape == plain.shape and torch.allclose(logits.float(), plain.float(), rtol=1e-4, atol=1e-6)


def own_logits(model: PreTrainedModel, ids: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """Return the logits of the model's own forward at some places, `[n, vocabulary]`.

    Args:
        model: A causal language model.
        ids: Padded token ids, `[rows, tokens]`.
        row: Rows of the places, `[n]`.
        column: Their columns, `[n]`.
    """
    if not keeps_logits(model):
        return model(input_ids=ids, use_cache=False).logits[row, column]
    columns, place = torch.unique(column, return_inverse=True)
    return model(input_ids=ids, use_cache=False, logits_to_keep=columns).logits[row, place]


def keeps_logits(model: PreTrainedModel) -> bool:
    """Whether the forward can be asked for the logits of some columns only."""
    return "logits_to_keep" in inspect.signature(model.forward).parameters
