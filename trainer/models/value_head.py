"""The critic: a language model's body with one number per token in place of its vocabulary."""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.models.language_head import state_width
from rollgym.trainer.models.weights import twin_of


class ValueModel(nn.Module):
    """Values of the states before each token.

    Args:
        policy: A causal language model, whose body's weights the critic's body starts with; the policy stays unchanged,
            and later changes to it do not affect the critic.

    Raises:
        ConfigError: If its body and its head cannot be separated.
    """

    def __init__(self, policy: PreTrainedModel) -> None:
        super().__init__()
        self.config = policy.config
        body = policy.base_model if policy.base_model is not policy else policy.get_decoder()
        if not isinstance(body, PreTrainedModel) or body is policy:
            raise ConfigError(
                f"model.path: {type(policy).__name__} has no body apart from its head, which a critic or a reward "
                "model could begin with: take another model, or an algorithm without a critic"
            )
        self.body = twin_of(body)
        # The one layer whose outputs are numbers to be compared: it stays in float32.
        self.head = nn.Linear(state_width(policy), 1, device=policy.device, dtype=torch.float32)
        # Values start at zero, so that the first advantages are the returns themselves.
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return values `[...]` of hidden states `[..., hidden]`."""
        # A sum of one, and no view of it: what leaves a module that is sharded must be a tensor of its own.
        values: Tensor = self.head(hidden.to(self.head.weight.dtype)).float().sum(dim=-1)
        return values
