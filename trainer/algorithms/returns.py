"""Discounted returns of tokens and of turns, where no critic says what is to come."""

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


def turn_returns(rewards: Tensor, mask: Tensor, turn_end: Tensor, *, discount: float = 0.95) -> Tensor:
    """Return, at each token of a turn, the turn's discounted return, float64 `[rows, tokens]`, zero outside the mask.

    ROLL's `agentic_reinforce`: a turn is one step, whatever it has of tokens.

    Args:
        rewards: Reward on each token; only those at turn ends are read.
        mask: True where the policy sampled the token.
        turn_end: True on the last sampled token of each turn.
        discount: From one turn to the next.
    """
    turn_end = turn_end & mask
    returns = torch.zeros(rewards.shape, dtype=torch.float64, device=rewards.device)
    running = returns.new_zeros(len(returns))
    for index in reversed(range(rewards.shape[1])):
        ahead = rewards[:, index].double() + discount * running
        running = torch.where(turn_end[:, index], ahead, running)
        returns[:, index] = torch.where(mask[:, index], running, 0.0)
    return returns


def sample_weights(lengths: Tensor, difficulty: Tensor | None = None, *, by_length: bool = False) -> Tensor:
    """Return a weight for each row, with mean 1 (ROLL's `difficulty_loss_weight` and `length_loss_weight`).

    `0.5 + 1.5 difficulty` times `1.5 - (n - shortest) / (longest - shortest)`: difficult and short ones weigh more.

    Args:
        lengths: Sampled tokens n of each row, `[rows]`.
        difficulty: How difficult each row's task is, kept within 0 and 1; None leaves that factor out.
        by_length: Whether lengths make a factor.
    """
    weights = torch.ones(lengths.shape, dtype=torch.float64, device=lengths.device)
    if difficulty is not None:
        weights = weights * (0.5 + 1.5 * difficulty.double().clamp(0.0, 1.0))
    if by_length and len(lengths):
        spread = lengths.double() - lengths.min()
        weights = weights * (1.5 - spread / (spread.max() + 1e-8))
    return weights / weights.mean().clamp(min=1e-8)
