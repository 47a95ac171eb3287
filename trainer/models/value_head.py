"""The critic: a language model's body with one number per token in place of its vocabulary."""

import copy

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


class ValueModel(nn.Module):
    """Values of the states before each token.

    Args:
        policy: A causal language model; its body is copied, the policy is left as it is.
    """

    def __init__(self, policy: PreTrainedModel) -> None:
        super().__init__()
        self.config = policy.config
        self.body = copy.deepcopy(policy.base_model)
        self.head = nn.Linear(policy.config.hidden_size, 1)
        # Values start at zero, so that the first advantages are the returns themselves.
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return values `[...]` of hidden states `[..., hidden]`."""
        return torch.squeeze(self.head(hidden), -1)
