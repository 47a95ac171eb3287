"""A loss of one's own: `algorithm.surrogate={kind: custom, function: examples.extensions.surrogate:smooth}`."""

import torch
from torch import Tensor

from rollgym import SurrogateInputs


def smooth(inputs: SurrogateInputs) -> Tensor:
    """The policy gradient, less of it the further a token's ratio is from 1: `-A r exp(-(log r)^2)`.

    Args:
        inputs: A micro-batch, `[rows, tokens]`: log-probabilities with gradient, log ratios, advantages, the mask.

    Returns:
        The loss of each token. It may depend on no other row: who shares a micro-batch is a matter of memory.
    """
    distance = inputs.log_ratio.detach().square()
    return -inputs.advantages * torch.exp(inputs.log_ratio - distance)
