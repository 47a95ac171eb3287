"""Losses of distillation: pure functions of the distributions of teacher and student at a token."""

import math
from typing import assert_never

import torch
from torch import Tensor

from rollgym.trainer.algorithms.modes import Divergence


def divergence(student: Tensor, teacher: Tensor, kind: Divergence, weight: float = 0.5) -> Tensor:
    """Return the divergence of each token, `[n]`, in nats.

    - forward_kl: KL(teacher || student), Hinton et al. 2015 (arXiv:1503.02531).
    - reverse_kl: KL(student || teacher), Gu et al. 2023 (MiniLLM, 2306.08543).
    - jsd: the generalised Jensen-Shannon divergence with the mixture `weight` teacher + (1 - `weight`) student: Agarwal
      et al. 2023 (GKD, 2306.13649), equation 1. Near weight 0 it goes as forward KL does, near 1 as reverse KL does.
    - skewed_forward_kl, skewed_reverse_kl: from the first distribution to a mixture with the share `weight` of it: Ko
      et al. 2024 (DistiLLM, 2402.03898), section 3.1.

    Args:
        student: Log-probabilities `[n, categories]`.
        teacher: Those of the teacher over the same categories; no gradient flows through them.
        kind: Which.
        weight: Weight of the mixture, for divergences that have one; above 0 and below 1.
    """
    teacher = teacher.detach()
    match kind:
        case "forward_kl":
            return _kl(teacher, student)
        case "reverse_kl":
            return _kl(student, teacher)
        case "jsd":
            mixture = _mixed(teacher, student, weight)
            return weight * _kl(teacher, mixture) + (1.0 - weight) * _kl(student, mixture)
        case "skewed_forward_kl":
            return _kl(teacher, _mixed(teacher, student, weight))
        case "skewed_reverse_kl":
            return _kl(student, _mixed(student, teacher, weight))
        case _:
            assert_never(kind)


def with_rest(logprobs: Tensor) -> Tensor:
    """Return log-probabilities of some tokens with that of all others together behind them, `[n, k + 1]`.

    A divergence over these categories is a lower bound of that over the whole vocabulary (the data-processing
    inequality), and never negative, which a sum over the teacher's k likeliest tokens alone can be.
    """
    share = logprobs.exp().sum(dim=-1, keepdim=True)
    # Rounding can leave nothing, or less: a rest of one in ten million keeps the logarithm and its gradient finite.
    rest = torch.log((1.0 - share).clamp(min=1e-7))
    return torch.cat([logprobs, rest], dim=-1)


def sampled_reverse_kl(
    logprobs: Tensor, behaviour: Tensor, teacher: Tensor, mask: Tensor, largest_ratio: float
) -> Tensor:
    """Return the policy-gradient loss of each token whose gradient estimates that of the reverse KL to the teacher.

    On the student's own tokens, the advantage of a token is log teacher - log student, the negated estimate of its
    reverse KL, with no discount over what follows (Lu et al. 2025, "On-Policy Distillation", Thinking Machines Lab).
    Tokens that an older student sampled are weighed by the detached ratio of the two, bounded above.

    Args:
        logprobs: Of the sampled tokens under the student, with gradient, `[rows, tokens]`.
        behaviour: Under the student that sampled them.
        teacher: Under the teacher.
        mask: True where the student sampled the token.
        largest_ratio: The bound.
    """
    zero = torch.zeros((), device=logprobs.device)
    now = logprobs.detach()
    advantage = torch.where(mask, teacher - now, zero)
    ratio = torch.where(mask, now - behaviour, zero).exp().clamp(max=largest_ratio)
    return -ratio * advantage * logprobs


def _kl(first: Tensor, second: Tensor) -> Tensor:
    """Return KL(first || second) of log-probabilities; what the first gives no mass adds nothing."""
    impossible = first == -math.inf
    mass = first.exp()
    difference = torch.where(impossible, 0.0, first) - torch.where(impossible, 0.0, second)
    return (mass * difference).sum(dim=-1)


def _mixed(first: Tensor, second: Tensor, share: float) -> Tensor:
    """Return the logarithm of `share` first + (1 - `share`) second."""
    return torch.logaddexp(first + math.log(share), second + math.log1p(-share))
