"""Ours beside the tinker cookbook's functions."""

from collections.abc import Mapping
from typing import Any

import torch

from peers.algorithms.ours import Case, Peer
from rollgym.trainer.algorithms.advantages import group_advantages, token_returns
from rollgym.trainer.algorithms.distillation import divergence
from rollgym.trainer.algorithms.kl import centred_kl_advantages, kl_estimate
from rollgym.trainer.algorithms.loss_settings import PreferenceLossSettings
from rollgym.trainer.algorithms.preference import Replies, paired_loss

Found = Mapping[str, Any]


def centred(case: Case) -> Found:
    """compute_advantages."""
    return {"advantages": group_advantages(case["scores"], case["groups"], scale="none")}


def penalised(case: Case) -> Found:
    """incorporate_kl_penalty: what it adds, outside the mask, too, is read inside it."""
    options = case.options
    added = centred_kl_advantages(
        case["old"],
        case["reference"],
        case.mask,
        options["kl_penalty_coef"],
    )
    return {"advantages": case["advantages"] + added}


def compared(case: Case) -> Found:
    """compute_kl_sample_train: means of k1 and k2 over all sampled tokens."""
    return {name: kl_estimate(case["old"], case["logprobs"], name)[case.mask].mean() for name in ("k1", "k2")}


def discounted(case: Case) -> Found:
    """discounted_future_sum_vectorized."""
    everywhere = torch.ones_like(case["rewards"], dtype=torch.bool)
    return {"returns": token_returns(case["rewards"], everywhere, discount=case.options["gamma"])}


def preference(case: Case) -> Found:
    """compute_dpo_loss."""
    settings = PreferenceLossSettings(beta=case.options["dpo_beta"])
    ones = torch.ones_like(case["chosen"])
    replies = [Replies(case[name], ones, case[f"{name}_reference"]) for name in ("chosen", "rejected")]
    return {"loss": paired_loss(settings, *replies).loss}


def reverse_kl(case: Case) -> Found:
    """reverse_kl_custom_loss: the student's distribution over the teacher's likeliest tokens is made one of its own."""
    student = torch.log_softmax(case["student"], dim=-1)
    return {"loss": divergence(student, case["teacher"].log(), "reverse_kl").sum()}


PEER = Peer(
    adapters={
        "advantage/compute_advantages": centred,
        "kl/incorporate_kl_penalty": penalised,
        "kl/compute_kl_sample_train": compared,
        "returns/discounted_future_sum_vectorized": discounted,
        "loss/dpo": preference,
        "loss/reverse_kl_custom_loss": reverse_kl,
    },
)
