"""Weights of tokens: `algorithm.selection={kind: custom, function: examples.extensions.selection:surprising}`."""

from torch import Tensor

from rollgym import StepTokens


def surprising(tokens: StepTokens) -> Tensor:
    """Weigh tokens by how unlikely they were, with mean 1 over all tokens of the optimizer step.

    Args:
        tokens: All rows of the step, before they are divided among micro-batches and ranks.

    Returns:
        A weight for each token, `[rows, tokens]`; what it is outside `tokens.mask` does not matter.
    """
    unlikely = 1.0 - tokens.behaviour_logprobs.exp()
    mean = unlikely[tokens.mask].mean()
    return unlikely / mean.clamp(min=1e-6)
