"""Discounted returns of tokens, without a critic."""

from typing import assert_never

import torch
from torch import Tensor

from rollgym.trainer.algorithms.modes import ReturnMask


def token_returns(
    rewards: Tensor, mask: Tensor, *, discount: float = 1.0, return_mask: ReturnMask = "skip"
) -> Tensor:
    """Return the discounted rewards from each sampled token on, float64 `[rows, tokens]`, zero outside the mask.

    REINFORCE and REINFORCE++ (arXiv:2501.03262) before it whitens.

    Args:
        rewards: Reward on each token; those outside the mask are not read.
        mask: True where the policy sampled the token.
        discount: Gamma.
        return_mask: What is made of a token outside the mask: `skip` passes over it (verl), `none` discounts by it as
            by any other (ROLL, slime, OpenRLHF), `reset` forgets all that comes after it, so that a reward reaches
            its own turn only (verl-agent, verl before 2026).
    """
    rewards = torch.where(mask, rewards.double(), 0.0)
    returns = torch.zeros_like(rewards)
    running = rewards.new_zeros(len(rewards))
    for index in reversed(range(rewards.shape[1])):
        here = mask[:, index]
        ahead = rewards[:, index] + discount * running
        returns[:, index] = torch.where(here, ahead, 0.0)
        match return_mask:
            case "skip":
                running = torch.where(here, ahead, running)
            case "none":
                running = ahead
            case "reset":
                running = torch.where(here, ahead, 0.0)
            case _:
                assert_never(return_mask)
    return returns
