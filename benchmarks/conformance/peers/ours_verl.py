"""Ours beside verl's functions."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.conformance.peers.ours import Case, Choice, Peer, advantages, algorithm, loss
from trainer.algorithms.advantages import whitened
from trainer.algorithms.aggregation import Denominators, aggregate
from trainer.algorithms.corrections import (
    banded,
    importance_weights,
    mismatch_metrics,
    normalised,
    rejection_mask,
    truncated,
)
from trainer.algorithms.gdpo import gdpo_advantages
from trainer.algorithms.kl import kl_estimate
from trainer.algorithms.loss_settings import KLSettings
from trainer.algorithms.objective import critic_loss
from trainer.algorithms.state import adapted_coefficient
from trainer.algorithms.token_baseline import optimal_token_baseline_advantages

Found = Mapping[str, Any]

GROUP = {
    "grpo": {"baseline": "mean"},
    "grpo_vectorized": {"baseline": "mean"},
    "grpo_passk": {"baseline": "second_best"},
    "rloo": {"baseline": "leave_one_out", "scale": "none"},
    "rloo_vectorized": {"baseline": "leave_one_out", "scale": "none", "singleton": "zero"},
    "opo": {"baseline": "length_weighted", "scale": "none"},
    "gpg": {"baseline": "mean", "scale": "none", "factor": "nonzero_scores"},
    "reinforce_plus_plus_baseline": {"baseline": "mean", "scale": "none", "whiten": True},
}
ESTIMATORS = {
    "kl": "k1",
    "k1": "k1",
    "abs": "abs",
    "mse": "k2",
    "k2": "k2",
    "low_var_kl": "k3",
    "k3": "k3",
}


def group(case: Case) -> Found:
    """Advantages of episodes."""
    chosen = {"kind": "group", "singleton": "raw", **GROUP[case.function.removeprefix("advantage/")]}
    if not case.options.get("norm_adv_by_std_in_grpo", True):
        chosen["scale"] = "none"
    if "epsilon" in case.options:
        chosen["epsilon"] = case.options["epsilon"]
    settings = algorithm(advantage=chosen)
    found = advantages(settings, case.mask, case["rewards"].sum(dim=1), case["groups"])
    return {"advantages": found.advantages}


def remax(case: Case) -> Found:
    """Returns of tokens less the greedy episode's."""
    settings = algorithm(
        advantage={"kind": "token_return", "gamma": 1.0, "whiten": False, "baseline": "greedy"}
    )
    found = advantages(
        settings, case.mask, case["rewards"], case["groups"], turns=True, greedy=case["greedy"]
    )
    return {"advantages": found.advantages, "returns": token_returns(case, gamma=1.0).advantages}


def gdpo(case: Case) -> Found:
    """Several rewards."""
    scores = torch.stack([case["format"], case["accuracy"]])
    found = gdpo_advantages(
        scores,
        case["groups"],
        weights=case.options["gdpo_reward_weights"],
        scale="group_std" if case.options["norm_adv_by_std_in_grpo"] else "none",
        singleton="raw",
    )
    return {"advantages": whitened(found[:, None].expand(case.mask.shape), case.mask)}


def gae(case: Case) -> Found:
    """GAE over sampled tokens, whitened."""
    settings = algorithm(
        advantage={"kind": "gae", "gamma": case.options["gamma"], "gae_lambda": case.options["lam"]},
        critic={},
    )
    found = advantages(
        settings, case.mask, case["rewards"], case["groups"], turns=True, values=case["values"]
    )
    return {"advantages": found.advantages, "returns": found.returns}


def token_returns(case: Case, *, gamma: float, whiten: bool = False, **parts: Any) -> Any:
    """Returns from each token on."""
    settings = algorithm(advantage={"kind": "token_return", "gamma": gamma, "whiten": whiten}, **parts)
    rows = {"old_logprobs": case["old"], "reference_logprobs": case["reference"]} if parts else {}
    return advantages(settings, case.mask, case["rewards"], case["groups"], turns=True, **rows)


def reinforce_plus_plus(case: Case) -> Found:
    """Returns of tokens, whitened."""
    gamma = case.options["gamma"]
    return {
        "advantages": token_returns(case, gamma=gamma, whiten=True).advantages,
        "returns": token_returns(case, gamma=gamma).advantages,
    }


def compute_rewards(case: Case) -> Found:
    """A penalty at each token: of what is to come nothing counts."""
    estimator = ESTIMATORS[case.options.get("kl_penalty", "k1")]
    kl = {"coefficient": case.options["kl_ratio"], "estimator": estimator, "placement": "reward"}
    return {"rewards": token_returns(case, gamma=0.0, kl=kl).advantages}


def distances(case: Case) -> Found:
    """How far apart two policies are."""
    found = mismatch_metrics(case["old"], case["behaviour"], case.mask)
    return {"kl": found["mismatch/k1"], "k3": found["mismatch/k3"]}


def optimal_baseline(case: Case) -> Found:
    """The optimal token baseline."""
    found, returns = optimal_token_baseline_advantages(
        case["rewards"],
        case.mask,
        case["groups"],
        case["old"],
        case["squared_probabilities"],
        weights=case.inputs.get("weights"),
        zero_tail=case.options["handle_zero_tail"],
    )
    return {"advantages": found, "returns": returns}


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


def kl_penalty(case: Case) -> Found:
    """An estimate of the divergence at each token."""
    name = case.options["kl_penalty"]
    return {
        "kl": kl_estimate(
            case["logprobs"],
            case["reference"],
            ESTIMATORS[name.removesuffix("+")],
            straight_through=name.endswith("+"),
        )
    }


def adaptive_kl(case: Case) -> Found:
    """The coefficient after an update."""
    options = case.options
    settings = KLSettings(
        coefficient=options["init_kl_coef"], target=options["target_kl"], horizon=options["horizon"]
    )
    return {
        "coefficient": adapted_coefficient(options["init_kl_coef"], case["kl"], options["n_steps"], settings)
    }


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


def has_group_of_one(case: Case) -> bool:
    """Whether some episode is alone."""
    return bool((torch.unique(case["groups"], return_counts=True)[1] == 1).any())


def has_equal_group(case: Case) -> bool:
    """Whether the scores of some group are all the same."""
    scores = case["rewards"].sum(dim=1)
    members = [scores[case["groups"] == group] for group in case["groups"].unique()]
    return any(len(each) > 1 and float(each.max() - each.min()) < 1e-6 for each in members)


def varies(case: Case) -> bool:
    """Whether advantages differ within a row."""
    return any(len(row[kept].unique()) > 1 for row, kept in zip(case["advantages"], case.mask, strict=True))


def rejects(case: Case) -> bool:
    """Whether some token is rejected, and verl counts what is left."""
    return "rollout_rs" in case.options and case.options.get("counted") == "kept"


PEER = Peer(
    adapters={
        **{f"advantage/{name}": group for name in GROUP},
        "advantage/remax": remax,
        "advantage/gdpo": gdpo,
        "advantage/gae": gae,
        "advantage/reinforce_plus_plus": reinforce_plus_plus,
        "advantage/optimal_token_baseline": optimal_baseline,
        "advantage/tir_optimal_token_baseline": optimal_baseline,
        "masked_whiten": lambda case: {"values": whitened(case["values"], case.mask)},
        "compute_rewards": compute_rewards,
        **{f"apply_kl_penalty/{name}": compute_rewards for name in ("k1", "abs", "k2", "k3")},
        "offpolicy_metrics": distances,
        **{
            f"agg_loss/{mode}": agg_loss
            for mode in (
                "token-mean",
                "token-sum",
                "seq-mean-token-sum",
                "seq-mean-token-sum-norm",
                "seq-mean-token-mean",
            )
        },
        **{
            f"loss/{name}": policy
            for name in (
                "vanilla",
                "dppo_tv",
                "dppo_kl",
                "gspo",
                "sapo",
                "gpg",
                "geo_mean",
                "dro",
                "cispo",
                "kl_cov",
                "clip_cov",
            )
        },
        "loss/value": value,
        "loss/vanilla corrected": corrected,
        "loss/bypass_mode": bypass,
        **{f"kl_penalty/{name}{plus}": kl_penalty for name in ESTIMATORS for plus in ("", "+")},
        "AdaptiveKLController": adaptive_kl,
        "rollout_is/token": weights,
        "rollout_is/sequence": weights,
        **{
            f"rollout_rs/{level}_{k}": rejection
            for level in ("token", "seq_sum", "seq_mean", "seq_max")
            for k in ("k1", "k2", "k3")
        },
        "rollout_rs/several": rejection,
    },
    choices=(
        Choice(
            ("advantage/grpo",),
            "group of one: A = R, not R / (1 + epsilon) (docs: group of one)",
            lambda case: has_group_of_one(case) and case.options["norm_adv_by_std_in_grpo"],
        ),
        Choice(
            ("advantage/grpo_vectorized",),
            "a deviation up to 1e-6 gives 0 (docs: group of equal returns)",
            has_equal_group,
        ),
        Choice(
            ("advantage/optimal_token_baseline",),
            "an episode without tokens is no member of its group (docs: members of a group)",
            lambda case: not bool(case.mask.any(dim=1).all()),
        ),
        Choice(
            ("loss/geo_mean",),
            "each token's own advantage, not their mean in the row (docs: GMPO)",
            varies,
        ),
        Choice(
            ("loss/vanilla corrected",),
            "rejected tokens stay in the denominator (docs: rejected tokens)",
            rejects,
        ),
    ),
)
