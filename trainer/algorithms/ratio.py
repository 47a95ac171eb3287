"""How far the policy has moved from where the update began, by token, by turn or by row."""

from typing import Literal, assert_never

import torch
from torch import Tensor

from trainer.algorithms.modes import RatioLevel


def log_ratio(
    logprobs: Tensor,
    old_logprobs: Tensor,
    mask: Tensor,
    turn_index: Tensor,
    *,
    level: RatioLevel = "token",
    clamp: float = 20.0,
) -> Tensor:
    """Return the log of the ratio that the surrogate reads, `[rows, tokens]`; zero outside the mask.

    Above the token level, the value is the mean over the turn or row and the gradient is the token's own: the
    GSPO-token form, `sg(mean) + lp - sg(lp)`. Its gradient equals that of the plain sequence ratio where the
    advantage is constant in the row, and it still allows an advantage per token.

    Args:
        logprobs: Log-probabilities with gradient.
        old_logprobs: Log-probabilities at the start of the update.
        mask: True where a token counts.
        turn_index: Turn of each counted token.
        level: Over what the log ratio is averaged.
        clamp: Largest magnitude of the result, so that its exponential stays finite.
    """
    logprobs = torch.where(mask, logprobs, 0.0)
    difference = logprobs - torch.where(mask, old_logprobs, 0.0)
    if level != "token":
        average = segment_mean(difference.detach(), mask, turn_index, level)
        difference = torch.where(mask, average + logprobs - logprobs.detach(), 0.0)
    return difference.clamp(-clamp, clamp)


def segment_mean(
    values: Tensor, mask: Tensor, turn_index: Tensor, level: Literal["turn", "sequence"]
) -> Tensor:
    """Return, at each counted token, the mean of `values` over its turn or row; zero outside the mask."""
    rows, tokens = mask.shape
    values = torch.where(mask, values, 0.0)
    match level:
        case "sequence":
            average = values.sum(dim=1) / mask.sum(dim=1).clamp(min=1)
            return torch.where(mask, average[:, None], 0.0)
        case "turn":
            if mask.numel() == 0:
                return values
            turns = torch.where(mask, turn_index, 0)
            width = int(turns.max()) + 1
            row = torch.arange(rows, device=mask.device)[:, None].expand(rows, tokens)
            key = (row * width + turns).flatten()
            total = values.new_zeros(rows * width).index_add(0, key, values.flatten())
            count = values.new_zeros(rows * width).index_add(0, key, mask.flatten().to(values.dtype))
            average = (total / count.clamp(min=1))[key].view(rows, tokens)
            return torch.where(mask, average, 0.0)
        case _:
            assert_never(level)
