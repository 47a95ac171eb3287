"""Ours beside verl's losses, their aggregation, and its corrections: part of `ours_verl.py`."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from peers.algorithms.ours import Case, algorithm, loss
from rollgym.trainer.algorithms.aggregation import Denominators, aggregate
from rollgym.trainer.algorithms.corrections import (
    banded,
    importance_weights,
    normalised,
    rejection_mask,
    truncated,
)
from rollgym.trainer.algorithms.objective import critic_loss

Found = Mapping[str, Any]


def agg_loss(case: Case) -> Found:
    """One number; what ranks' gradients are averaged over is the share of each."""
    options = case.options
    found = aggregate(
        case["values"],
        case.mask,
        options["loss_agg_mode"],
        denominators(case),
        horizon=options.get("loss_scale_factor") or case.mask.shape[1],
    )
    return {"loss": found * options.get("dp_size", 1)}


def denominators(case: Case) -> Denominators:
    """Return the counts that verl was given, or else those of the mask."""
    own = Denominators.from_mask(case.mask)
    tokens, rows = (case.options.get(name) for name in ("batch_num_tokens", "global_batch_size"))
    return Denominators(tokens or own.tokens, rows or own.rows)


def bounds(case: Case) -> dict[str, float]:
    """Return how far ratios may go."""
    both = case.options["clip_ratio"]
    # The configuration's own defaults.
    return {
        "clip_low": case.options.get("clip_ratio_low", 0.2 if both else both),
        "clip_high": case.options.get("clip_ratio_high", 0.2 if both else both),
    }


def surrogate(case: Case) -> dict[str, Any]:
    """Return our parts of verl's policy loss of this name."""
    options, clip = case.options, bounds(case)
    low, high = clip["clip_low"], clip["clip_high"]
    own = options.get("policy_loss", {})
    cap = options.get("clip_ratio_c", 3.0)
    match case.function.split()[0].removeprefix("loss/"):
        case "vanilla" | "bypass_mode":
            return {"surrogate": {"kind": "ppo", **clip, "dual_clip": cap}}
        case "dppo_tv" | "dppo_kl" as name:
            divergence = name.removeprefix("dppo_")
            return {
                "surrogate": {"kind": "dppo", "divergence": divergence, "low": low, "high": high, "cap": cap}
            }
        case "gspo":
            return {"surrogate": {"kind": "ppo", **clip}, "ratio": {"level": "sequence"}}
        case "sapo":
            return {
                "surrogate": {
                    "kind": "sapo",
                    "tau_positive": options["tau_pos"],
                    "tau_negative": options["tau_neg"],
                }
            }
        case "gpg":
            return {"surrogate": {"kind": "reinforce"}}
        case "geo_mean":
            return {"surrogate": {"kind": "gmpo", **clip}, "ratio": {"level": "sequence"}}
        case "cpgd":
            return {"surrogate": {"kind": "cpgd", **clip}}
        case "dro":
            return {"surrogate": {"kind": "quadratic", "coefficient": own["dro_beta"]}}
        case "cispo":
            return {"surrogate": {"kind": "weighted", "weight_low": 1 - low, "weight_high": 1 + high}}
        case "kl_cov":
            selection = {"kind": "kl_cov", "fraction": own["kl_cov_ratio"], "coefficient": own["ppo_kl_coef"]}
            return {"surrogate": {"kind": "ppo", "clip_low": None, "clip_high": None}, "selection": selection}
        case "clip_cov":
            selection = {
                "kind": "clip_cov",
                "fraction": own["clip_cov_ratio"],
                "low": own["clip_cov_lb"],
                "high": own["clip_cov_ub"],
            }
            return {"surrogate": {"kind": "ppo", **clip}, "selection": selection}
        case name:
            raise ValueError(name)


def policy(case: Case) -> Found:
    """A policy loss."""
    mode, counts = case.options["loss_agg_mode"], denominators(case)
    if case.function in ("loss/sapo", "loss/geo_mean"):
        mode = "seq-mean-token-mean"
    if case.function == "loss/geo_mean":
        # A mean over all rows, those without tokens too.
        counts = Denominators(int(case.mask.sum()), len(case.mask))
    settings = algorithm(**surrogate(case), aggregation={"mode": mode})
    return {"loss": loss(settings, case, counts=counts)}


def value(case: Case) -> Found:
    """The critic's loss."""
    settings = algorithm(
        advantage={"kind": "gae"},
        critic={"value_clip": case.options["cliprange_value"]},
        aggregation={"mode": case.options["loss_agg_mode"]},
    )
    found, _ = critic_loss(
        settings,
        case["values"],
        case["old_values"],
        case["returns"],
        case.mask,
        Denominators.from_mask(case.mask),
    )
    return {"loss": found}


def weights(case: Case) -> Found:
    """Importance weights."""
    options = case.options
    level = "sequence" if options["rollout_is"] == "sequence" else "token"
    found = importance_weights(case["old"], case["behaviour"], case.mask, level=level)
    low, high = band(options["rollout_is_threshold"])
    found = truncated(found, high) if low is None else banded(found, low, high)
    if options["rollout_is_batch_normalize"]:
        rows = torch.arange(len(case.mask))[:, None].expand(case.mask.shape)
        found = normalised(found, case.mask, rows if level == "sequence" else None)
    return {"weights": found}


def band(threshold: str | float) -> tuple[float | None, float]:
    """Return the bounds that a threshold says."""
    if isinstance(threshold, float):
        return None, threshold
    low, high = threshold.split("_")
    return float(low), float(high)


def rejections(names: str, thresholds: str) -> list[dict[str, Any]]:
    """Return our settings of verl's rejections: bounds of k1 are logarithms of bounds of the inverse ratio."""
    found = []
    for name, threshold in zip(names.split(","), thresholds.split(","), strict=True):
        level, _, measure = name.rpartition("_")
        chosen: dict[str, Any] = {"level": "token", "measure": measure}
        if level != "token":
            chosen |= {"level": "sequence", "statistic": level.removeprefix("seq_")}
        if measure == "k1":
            low, high = threshold.split("_") if "_" in threshold else (str(1 / float(threshold)), threshold)
            chosen |= {"low": math.log(float(low)), "high": math.log(float(high))}
        else:
            chosen["high"] = float(threshold)
        found.append(chosen)
    return found


def rejection(case: Case) -> Found:
    """Which tokens are kept."""
    kept = torch.ones_like(case.mask)
    rows = torch.arange(len(case.mask))[:, None].expand(case.mask.shape)
    for each in rejections(case.options["rollout_rs"], case.options["rollout_rs_threshold"]):
        segment = None if each.pop("level") == "token" else rows
        kept = kept & rejection_mask(case["old"], case["behaviour"], case.mask, segment=segment, **each)
    return {"kept": kept}


def correction(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return our settings of verl's rollout correction."""
    reject = (
        rejections(options["rollout_rs"], options["rollout_rs_threshold"]) if "rollout_rs" in options else []
    )
    if options["rollout_is"] is None:
        return {"kind": "reject", "reject": reject} if reject else {"kind": "off"}
    low, high = band(options["rollout_is_threshold"])
    chosen = {"kind": "truncate", "cap": high} if low is None else {"kind": "band", "low": low, "high": high}
    return {
        **chosen,
        "level": options["rollout_is"],
        "normalise": options.get("rollout_is_batch_normalize", False),
        "reject": reject,
    }


def corrected(case: Case) -> Found:
    """PPO's loss with a correction."""
    settings = algorithm(
        **surrogate(case),
        correction=correction(case.options),
        aggregation={"mode": case.options["loss_agg_mode"]},
    )
    return {"loss": loss(settings, case, counts=denominators(case))}


def bypass(case: Case) -> Found:
    """Ratios, weights and rejections are all of the current policy to the one that sampled."""
    options = case.options
    parts = surrogate(case)
    if options["loss_type"] == "reinforce":
        parts = {"surrogate": {"kind": "reinforce"}}
        if level := options["rollout_is"]:
            high = options["rollout_is_threshold"]
            parts = {
                "surrogate": {"kind": "weighted", "weight_low": 0.0, "weight_high": high},
                "ratio": {"level": "sequence_sum" if level == "sequence" else "token"},
            }
    chosen = correction({**options, "rollout_is": None})
    for each in chosen.get("reject", ()):
        each["policy"] = "current"
    settings = algorithm(
        **parts, correction=chosen, proximal="behaviour", aggregation={"mode": options["loss_agg_mode"]}
    )
    sampled = Case(case.function, options, {**case.inputs, "behaviour": case["old"]})
    return {"loss": loss(settings, sampled, counts=denominators(case))}
