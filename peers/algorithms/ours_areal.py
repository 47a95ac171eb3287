"""Ours beside AReaL's functions."""

from collections.abc import Mapping
from typing import Any

import torch

from peers.algorithms.ours import Case, Choice, Peer, advantages, algorithm, loss, shaped
from rollgym.trainer.algorithms.advantages import whitened
from rollgym.trainer.algorithms.aggregation import Denominators
from rollgym.trainer.algorithms.corrections import (
    importance_weights,
    interpolated_logprobs,
    rejection_mask,
    truncated,
    version_shares,
)
from rollgym.trainer.algorithms.filter_settings import OverlongSettings, RewardSettings
from rollgym.trainer.algorithms.kl import kl_estimate
from rollgym.trainer.algorithms.loss_settings import PreferenceLossSettings
from rollgym.trainer.algorithms.objective import critic_loss
from rollgym.trainer.algorithms.preference import Replies, paired_loss
from rollgym.trainer.algorithms.prepare import second_moment_mask

Found = Mapping[str, Any]
MEASURES = {"ratio": "ratio", "kl_k1": "k1", "kl_k2": "k2", "kl_k3": "k3"}


def surrogate(case: Case) -> Found:
    """ppo_actor_loss_fn without rejection."""
    options = case.options
    higher = options["eps_clip_higher"]
    settings = algorithm(
        surrogate={
            "kind": "ppo",
            "clip_low": options["eps_clip"],
            "clip_high": options["eps_clip"] if higher is None else higher,
            "dual_clip": options["c_clip"],
        },
        ratio={"level": options.get("importance_sampling_level", "token")},
        minibatches=2,
    )
    return {"loss": loss(settings, case)}


def sapo(case: Case) -> Found:
    """sapo_loss_fn."""
    options = case.options
    settings = algorithm(
        surrogate={"kind": "sapo", "tau_positive": options["tau_pos"], "tau_negative": options["tau_neg"]},
        ratio={"level": options["importance_sampling_level"]},
        minibatches=2,
    )
    return {"loss": loss(settings, case)}


def rejection(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return our rejection; AReaL's k1 is the log of the ratio, ours of its inverse."""
    measure = MEASURES[options["metric"]]
    low, high = options["lower"], options["upper"]
    if measure == "k1":
        low, high = -high, None if low is None else -low
    chosen: dict[str, Any] = {"level": options["level"], "measure": measure, "low": low, "high": high}
    if options["level"] == "sequence":
        chosen["statistic"] = options["agg"]
    if measure == "k1" and options["agg"] == "max" and options["level"] == "sequence":
        # That the largest of theirs is below a bound says that each of ours is above its negative.
        chosen |= {"statistic": "all", "high": None}
    return chosen


def correction(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return our correction: with ratios of sequences the weight is the sequence's, too."""
    low, high = options["lower"], options["upper"]
    level = "geometric" if options["level"] == "sequence" and options["metric"] == "ratio" else "token"
    if options["action"] == "clamp":
        return {"kind": "truncate", "level": level, "cap": high, "floor": low or 0.0}
    if options["metric"] == "ratio" and options["agg"] == "mean":
        return {"kind": "band", "level": level, "low": low or 0.0, "high": high}
    return {"kind": "truncate", "cap": None, "level": level, "reject": [rejection(options)]}


def rejected(case: Case) -> Found:
    """The loss with a rejection."""
    settings = algorithm(correction=correction(case.options), minibatches=2)
    return {"loss": loss(settings, case)}


def weights(case: Case) -> Found:
    """apply_rejection_sampling."""
    options = case.options
    geometric = options["level"] == "sequence" and options["metric"] == "ratio"
    level = "geometric" if geometric else "token"
    found = importance_weights(case["old"], case["behaviour"], case.mask, level=level)
    low, high = options["lower"], options["upper"]
    if options["action"] == "clamp":
        return {"kept": case.mask, "weights": truncated(found, high, low or 0.0)}
    chosen = rejection(options)
    rows = torch.arange(len(case.mask))[:, None].expand(case.mask.shape)
    segment = rows if chosen.pop("level") == "sequence" else None
    sides = (case["old"], case["behaviour"])
    if options["metric"] == "kl_k3":
        # Theirs is k3 of the policy in training's own samples.
        sides = (case["behaviour"], case["old"])
    kept = rejection_mask(*sides, case.mask, segment=segment, **chosen)
    return {"kept": kept, "weights": torch.where(kept, found, 0.0)}


def proximal(case: Case) -> Found:
    """compute_prox_logp_approximations."""
    shares = version_shares(case["versions"], case.options["current_version"])
    method = case.function.removeprefix("proximal/")
    if method == "rollout":
        shares = torch.zeros_like(shares)
    found = interpolated_logprobs(case["logprobs"], case["behaviour"], shares)
    return {"proximal": found}


def second_moment(case: Case) -> Found:
    """M2PO's mask."""
    kept = torch.zeros_like(case.mask)
    moved = (case["old"] - case["behaviour"])[case.mask]
    kept[case.mask] = second_moment_mask(moved, case.options["m2_threshold"])
    return {"kept": kept}


def divergence(case: Case) -> Found:
    """KLEstimator."""
    limit = 10.0 if case.options["apply_clamp"] else None
    found = kl_estimate(
        case["logprobs"], case["reference"], case.options["kl_estimator"], bounded=False, limit=limit
    )
    return {"kl": found, "loss": found[case.mask].sum()}


def critic(case: Case) -> Found:
    """ppo_critic_loss_fn."""
    options = case.options
    chosen: dict[str, Any] = {"value_clip": options["value_eps_clip"]}
    if options["loss_fn_type"] == "huber":
        chosen["loss"] = "huber"
    settings = algorithm(advantage={"kind": "gae"}, critic=chosen)
    names = ("values", "old_values", "returns", "mask")
    counts = Denominators.from_mask(case.mask)
    return {"loss": critic_loss(settings, *(case[name] for name in names), counts)[0]}


def masked_normalised(case: Case) -> Found:
    """masked_normalization."""
    unbiased = case.options["unbiased"]
    return {
        "normalised": whitened(
            case["values"], case.mask, unbiased=unbiased, form="deviation", epsilon=case.options["eps"]
        )
    }


def gae(case: Case) -> Found:
    """PPOActor._compute_advantages: scaled and bounded rewards, KL in them, GAE, whitening."""
    options = case.options
    scale, bound = options["reward_scaling"], options["reward_clip"] / options["reward_scaling"]
    parts = {
        "critic": {},
        "kl": {"coefficient": options["kl_ctl"], "estimator": "k1", "placement": "reward", "limit": 10.0}
        if options["kl_ctl"]
        else {},
        # Ours bounds rewards first, then scales and shifts.
        "reward": {
            "turn_low": -bound - options["reward_bias"],
            "turn_high": bound - options["reward_bias"],
            "scale": scale,
            "offset": options["reward_bias"] * scale,
        },
    }
    chosen = {"kind": "gae", "gamma": options["discount"], "gae_lambda": options["gae_lambda"]}
    form = {"whiten": False}
    if options["adv_norm"]:
        form = {"whiten": True, "whiten_form": "deviation", "whiten_epsilon": 1e-5}
    rows = {
        "values": case["values"],
        "old_logprobs": case["logprobs"],
        "reference_logprobs": case["reference"],
    }
    groups = torch.arange(len(case.mask))
    found = advantages(
        algorithm(advantage={**chosen, **form}, **parts), case.mask, case["scores"], groups, **rows
    )
    return {"advantages": found.advantages, "returns": found.returns}


def overlong(case: Case) -> Found:
    """reward_overlong_penalty."""
    options = case.options
    settings = RewardSettings(
        overlong=OverlongSettings(
            max_tokens=options["max_response_length"],
            buffer_tokens=options["overlong_tokens"],
            penalty=options["overlong_penalty_factor"],
        )
    )
    return {"rewards": shaped(settings, case["scores"], lengths=case.mask.sum(dim=1))}


def preference(case: Case) -> Found:
    """dpo_preference_loss, of differences of log-ratios."""
    kind = "dpo" if case.options["loss_type"] == "sigmoid" else "ipo"
    settings = PreferenceLossSettings.model_validate({"kind": kind, "beta": case.options["beta"]})
    none, ones = torch.zeros_like(case["logits"]), torch.ones_like(case["logits"])
    return {
        "loss": paired_loss(settings, Replies(case["logits"], ones, none), Replies(none, ones, none)).loss
    }


def beyond_buffer(case: Case) -> bool:
    """Whether some reply is longer than the longest that is allowed."""
    return bool((case.mask.sum(dim=1) > case.options["max_response_length"]).any())


PEER = Peer(
    adapters={
        "loss/ppo_actor token": surrogate,
        "loss/ppo_actor sequence": surrogate,
        "loss/sapo token": sapo,
        "loss/sapo sequence": sapo,
        **{
            f"{part}{action} {level}": adapter
            for part, adapter in (("loss/rejection ", rejected), ("correction/", weights))
            for action in ("mask", "clamp")
            for level in ("token", "sequence")
        },
        **{f"proximal/{method}": proximal for method in ("loglinear", "rollout")},
        "selection/m2po": second_moment,
        "kl/estimator": divergence,
        "loss/critic": critic,
        "advantage/masked_normalization": masked_normalised,
        "advantage/gae": gae,
        "reward/overlong_penalty": overlong,
        "loss/dpo": preference,
    },
    choices=(
        Choice(
            ("loss/ppo_actor sequence",),
            "GSPO: each token's own advantage, not the row's mean",
            lambda case: bool((case["advantages"] != case["advantages"][:, :1]).any()),
        ),
        Choice(
            ("loss/rejection mask",),
            "k3 of sampled tokens: exp(d) - 1 - d, d the log of the ratio to the policy that sampled",
            lambda case: case.options["metric"] == "kl_k3",
        ),
        Choice(
            ("advantage/normalization",),
            "group of one: 0, not the raw score",
            lambda case: case.options["group_size"] == 1 and case.options["mean_leave1out"],
        ),
        Choice(
            ("reward/overlong_penalty",),
            "overlong penalty: full at the longest length, not beyond",
            beyond_buffer,
        ),
    ),
)
