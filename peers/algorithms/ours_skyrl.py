"""Ours beside SkyRL's functions, whose losses are sums."""

from typing import Any

import torch
from torch import Tensor

from peers.algorithms.ours import Case, Choice, Peer, advantages, algorithm, episodes_of, loss
from peers.algorithms.ours_verl import Found, adaptive_kl, alone
from rollgym.trainer.algorithms.advantages import generalized_advantages, token_returns, whitened
from rollgym.trainer.algorithms.aggregation import Denominators, aggregate
from rollgym.trainer.algorithms.batch import StepTokens
from rollgym.trainer.algorithms.credit import select_episodes
from rollgym.trainer.algorithms.group_filters import ZeroVarianceFilter
from rollgym.trainer.algorithms.kl import kl_estimate
from rollgym.trainer.algorithms.losses import dppo_surrogate
from rollgym.trainer.algorithms.objective import critic_loss
from rollgym.trainer.algorithms.prepare import prepare_step
from rollgym.trainer.algorithms.selection import filter_groups

GROUP: dict[str, dict[str, Any]] = {
    "grpo": {"singleton": "raw"},
    "rloo": {"baseline": "leave_one_out", "scale": "none"},
    "maxrl": {"scale": "group_mean", "singleton": "raw"},
}
MODES = {
    "token_mean": "token-mean",
    "token_mean_legacy": "token-mean",
    "sequence_mean": "seq-mean-token-mean",
    "seq_mean_token_sum_norm": "seq-mean-token-sum-norm",
    "prompt_mean": "seq-mean-token-mean",
}


def group(case: Case) -> Found:
    """Advantages of episodes."""
    chosen = {"kind": "group", **GROUP[case.function.removeprefix("advantage/")]}
    if not case.options.get("grpo_norm_by_std", True):
        chosen["scale"] = "none"
    if "epsilon" in case.options:
        chosen["epsilon"] = case.options["epsilon"]
    found = advantages(algorithm(advantage=chosen), case.mask, case["rewards"].sum(dim=1), case["groups"])
    return {"advantages": found.advantages}


def reinforce(case: Case) -> Found:
    """Returns of tokens that forget what comes after an observation."""
    found = token_returns(case["rewards"], case.mask, discount=case.options["gamma"], return_mask="reset")
    return {"advantages": whitened(found, case.mask), "returns": found}


def gae(case: Case) -> Found:
    """GAE through every column."""
    found, returns = generalized_advantages(
        case["rewards"],
        case["values"],
        case.mask,
        gamma=case.options["gamma"],
        gae_lambda=case.options["lambd"],
        gae_mask="none",
    )
    return {"advantages": whitened(found, case.mask), "returns": returns}


def reduction(case: Case) -> Found:
    """PPO's loss, reduced; a sequence is a row, or all rows of a prompt."""
    options, mask = case.options, case.mask
    name = options["loss_reduction"]
    aggregation: dict[str, Any] = {"mode": MODES[name]}
    if name == "seq_mean_token_sum_norm":
        aggregation["horizon"] = options["max_seq_len"]
    further = {}
    rows = len(mask)
    if name == "prompt_mean":
        aggregation["unit"] = "group"
        rows = len(options["prompt_boundaries"])
        counts = [(end - start, int(mask[start:end].sum())) for start, end in options["prompt_boundaries"]]
        further["lengths"] = torch.tensor([tokens for size, tokens in counts for _ in range(size)])
    settings = algorithm(aggregation=aggregation)
    return {"loss": loss(settings, case, counts=Denominators(int(mask.sum()), rows), **further)}


def correction(options: dict[str, Any]) -> dict[str, Any]:
    """Return our settings of SkyRL's off-policy correction."""
    reject = []
    if (metric := options.get("sequence_mask_metric")) is not None:
        name = "geo_mask" if metric == "geometric" else "product_mask"
        statistic = "mean" if metric == "geometric" else "sum"
        low, high = options.get(f"{name}_low", 0.5), options.get(f"{name}_high", 2.0)
        reject.append({"level": "sequence", "statistic": statistic, "low": low, "high": high})
    for name, level in (("outlier_token", {"level": "sequence", "statistic": "all"}), ("token_mask", {})):
        low, high = (options.get(f"{name}_is_threshold_{end}") for end in ("low", "high"))
        if low is not None or high is not None:
            reject.append({**level, "low": low, "high": high})
    if (level := options.get("tis_ratio_type")) is None:
        return {"kind": "reject", "reject": reject}
    cap = options.get(f"{level}_tis_ratio_clip_high", 2.0 if level == "token" else 5.0)
    return {"kind": "truncate", "cap": cap, "level": level, "reject": reject}


def surrogate(case: Case) -> dict[str, Any]:
    """Return our parts of SkyRL's policy loss of this name."""
    options = case.options
    low, high = options.get("eps_clip_low", 0.2), options.get("eps_clip_high", 0.2)
    clip = {"clip_low": low, "clip_high": high}
    match options["policy_loss_type"]:
        case "regular":
            return {"surrogate": {"kind": "ppo", **clip}}
        case "dual_clip":
            return {"surrogate": {"kind": "ppo", **clip, "dual_clip": options["clip_ratio_c"]}}
        case "gspo":
            return {"surrogate": {"kind": "ppo", **clip}, "ratio": {"level": "sequence"}}
        case "sapo":
            own = options.get("sapo", {"tau_pos": 1.0, "tau_neg": 1.05})
            return {
                "surrogate": {"kind": "sapo", "tau_positive": own["tau_pos"], "tau_negative": own["tau_neg"]}
            }
        case "cispo":
            own = options.get("cispo", {"cispo_eps_clip_low": 0.0, "cispo_eps_clip_high": 5.0})
            return {
                "surrogate": {
                    "kind": "weighted",
                    "weight_low": 1 - own["cispo_eps_clip_low"],
                    "weight_high": 1 + own["cispo_eps_clip_high"],
                }
            }
        case "rollout_is":
            bounds = {"weight_low": 1 - low, "weight_high": 1 + high, "outside": "drop"}
            return {"surrogate": {"kind": "weighted", **bounds}, "proximal": "behaviour"}
        case "clip_cov":
            own = options["clip_cov"]
            selection = {"fraction": own["clip_ratio"], "low": own["clip_cov_lb"], "high": own["clip_cov_ub"]}
            return {"surrogate": {"kind": "ppo", **clip}, "selection": {"kind": "clip_cov", **selection}}
        case "kl_cov":
            own = options["kl_cov"]
            selection = {"fraction": own["kl_cov_frac"], "coefficient": own["ppo_kl_coef"]}
            free = {"kind": "ppo", "clip_low": None, "clip_high": None}
            return {"surrogate": free, "selection": {"kind": "kl_cov", **selection}}
        case "importance_sampling":
            return {"surrogate": {"kind": "ppo", "clip_low": None, "clip_high": None}}
        case "cross_entropy":
            return {"surrogate": {"kind": "reinforce"}}
        case name:
            raise ValueError(name)


def policy(case: Case) -> Found:
    """A policy loss: the sum over tokens."""
    parts = surrogate(case)
    if "off_policy_correction" in case.options:
        parts["correction"] = correction(case.options["off_policy_correction"])
    settings = algorithm(**parts, aggregation={"mode": "token-sum"})
    given = case
    if case.options["policy_loss_type"] == "cross_entropy":
        ones = torch.ones_like(case["advantages"])
        given = Case(case.function, case.options, {**case.inputs, "advantages": ones})
    return {"loss": loss(settings, given)}


def dppo(case: Case) -> Found:
    """DPPO with the ratio itself in the loss."""
    own = case.options["dppo"]
    found = dppo_surrogate(
        case["logprobs"],
        case["behaviour"],
        case["advantages"],
        divergence="tv" if own["dppo_type"] == "binary_tv" else "kl",
        low=own["delta_low"],
        high=own["delta_high"],
        cap=None,
        form="ratio",
    )
    return {"loss": aggregate(found.loss, case.mask, "token-sum", Denominators.from_mask(case.mask))}


def corrected(case: Case) -> Found:
    """What a token's loss is multiplied by."""
    settings = algorithm(correction=correction(case.options["off_policy_correction"]))
    prepared = prepare_step(settings, step_tokens(case))
    return {"weights": prepared.weights}


def step_tokens(case: Case) -> StepTokens:
    """Return the rows of a step that are episodes."""
    none = torch.zeros(case.mask.shape)
    return StepTokens(
        trajectory=torch.arange(len(case.mask)),
        mask=case.mask,
        turn_index=none.long(),
        advantages=none,
        behaviour_logprobs=case["behaviour"],
        old_logprobs=case["old"],
        current_logprobs=case["old"],
    )


def critic(case: Case) -> Found:
    """The critic's loss."""
    settings = algorithm(
        advantage={"kind": "gae"},
        critic={"value_clip": case.options["value_clip"]},
        aggregation={"mode": "seq-mean-token-mean"},
    )
    counts = Denominators(int(case.mask.sum()), len(case.mask))
    found, _ = critic_loss(settings, case["values"], case["old_values"], case["returns"], case.mask, counts)
    return {"loss": found}


def approximate_kl(case: Case) -> Found:
    """An estimate of the divergence at each token, none outside the mask."""
    found = kl_estimate(case["logprobs"], case["reference"], case.options["kl_estimator_type"])
    return {"kl": torch.where(case.mask, found, 0.0)}


def zero_variance(case: Case) -> Found:
    """The episodes of the groups that are kept."""
    settings = ZeroVarianceFilter(kind="zero_variance", tolerance=case.options["tol"])
    groups = case["groups"].tolist()
    kept = filter_groups(settings, groups, case["scores"].tolist()).kept
    return {"kept": [place for place, group in enumerate(groups) if group in kept]}


def overlong(case: Case) -> Found:
    """The tokens of the episodes that were not cut off."""
    rows: Tensor = case["rows"]
    lengths = [[int(each.sum())] for each in rows]
    cut = case["truncated"].tolist()
    batch = episodes_of([0] * len(rows), [[0.0]] * len(rows), lengths, truncated=cut)
    chosen = select_episodes(algorithm(episodes={"kind": "finished"}), batch)
    return {"kept": rows & torch.tensor(chosen.kept)[:, None]}


def in_group_below_zero(case: Case) -> Tensor:
    """Return which episodes are in a group whose mean is below 0."""
    scores, groups = case["rewards"].sum(dim=1), case["groups"]
    return torch.where(groups[:, None] == groups[None], scores[None], 0.0).sum(dim=1) < 0


def masks_before_weights(case: Case) -> bool:
    """Whether tokens are dropped before the weight of their sequence is computed."""
    options = case.options.get("off_policy_correction", {})
    return "token_mask_is_threshold_low" in options and options.get("tis_ratio_type") == "sequence"


PEER = Peer(
    adapters={
        **{f"advantage/{name}": group for name in GROUP},
        "advantage/reinforce++": reinforce,
        "advantage/gae": gae,
        **{f"reduction/{name}": reduction for name in MODES},
        **{
            f"loss/{name}": policy
            for name in (
                "regular",
                "dual_clip",
                "sapo",
                "gspo",
                "cispo",
                "rollout_is",
                "clip_cov",
                "kl_cov",
                "cross_entropy",
                "importance_sampling",
            )
        },
        "loss/dppo": dppo,
        **{f"loss/{name} corrected": policy for name in ("regular", "gspo", "cispo", "sapo")},
        "off_policy_correction": corrected,
        "loss/critic": critic,
        **{f"compute_approx_kl/{name}": approximate_kl for name in ("k1", "abs", "k2", "k3")},
        "AdaptiveKLController": adaptive_kl,
        "zero_variance_filter": zero_variance,
        "apply_overlong_filtering": overlong,
    },
    choices=(
        Choice(
            ("advantage/grpo",),
            "group of one: A = R, not R / (1 + epsilon) (docs: group of one)",
            lambda case: case.options["grpo_norm_by_std"],
            rows=alone,
        ),
        Choice(
            ("advantage/maxrl",),
            "MaxRL divides by a mean above 0 only (docs: MaxRL)",
            rows=in_group_below_zero,
        ),
        Choice(
            ("reduction/token_mean_legacy",),
            "global denominators, no means of micro-batches (docs: SkyRL's token_mean_legacy)",
            lambda case: case.options["micro_batch_size"] < len(case.mask),
        ),
        Choice(
            ("loss/", "off_policy_correction"),
            "a sequence's weight is of all its tokens, rejected ones too (docs: weights beside rejections)",
            masks_before_weights,
        ),
    ),
)
