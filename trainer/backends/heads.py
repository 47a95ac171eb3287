"""From hidden states to what a loss reads: log-probabilities and entropies, or values."""

from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from trainer.backends.base import EntropyMode
from trainer.models.value_head import ValueModel


class Head(Protocol):
    """Turns the hidden states before some tokens into a number for each."""

    @property
    def model(self) -> nn.Module:
        """All that is trained."""
        ...

    def hidden(self, ids: Tensor) -> Tensor:
        """Return hidden states `[rows, tokens, width]` of padded ids `[rows, tokens]`."""
        ...

    def outputs(self, hidden: Tensor, targets: Tensor, entropy: EntropyMode) -> tuple[Tensor, Tensor | None]:
        """Return outputs and entropies `[n]` for hidden states `[n, width]` and the tokens that follow them."""
        ...


class PolicyHead:
    """Log-probabilities under the distribution that replies are drawn from.

    Args:
        model: A causal language model.
        temperature: The rollouts' sampling temperature: ratios compare equal distributions only.
    """

    def __init__(self, model: PreTrainedModel, temperature: float) -> None:
        self.model: PreTrainedModel = model
        self._temperature = temperature

    def hidden(self, ids: Tensor) -> Tensor:
        """Return hidden states `[rows, tokens, width]`."""
        return self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state

    def outputs(self, hidden: Tensor, targets: Tensor, entropy: EntropyMode) -> tuple[Tensor, Tensor | None]:
        """Return the log-probability of each target and, if asked, the entropy it was drawn with."""
        logits = self.model.get_output_embeddings()(hidden).float() / self._temperature
        distribution = logits.log_softmax(dim=-1)
        chosen = distribution.gather(-1, targets[:, None])[:, 0]
        if entropy == "none":
            return chosen, None
        with torch.set_grad_enabled(entropy == "gradient" and torch.is_grad_enabled()):
            return chosen, -(distribution.exp() * distribution).sum(dim=-1)


class ValueHead:
    """Values of the states before tokens.

    Args:
        model: The critic.
    """

    def __init__(self, model: ValueModel) -> None:
        self.model: ValueModel = model

    def hidden(self, ids: Tensor) -> Tensor:
        """Return hidden states `[rows, tokens, width]`."""
        return self.model.body(input_ids=ids, use_cache=False).last_hidden_state

    def outputs(self, hidden: Tensor, targets: Tensor, entropy: EntropyMode) -> tuple[Tensor, Tensor | None]:
        """Return the value of each state; targets and entropy mean nothing here."""
        return self.model(hidden), None
