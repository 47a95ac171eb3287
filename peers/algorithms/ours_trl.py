"""Ours beside TRL's GRPO and RLOO trainers."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from peers.algorithms.ours import Case, Choice, Peer, advantages, algorithm, loss, shaped
from rollgym.trainer.algorithms.advantages import gdpo_advantages, group_advantages
from rollgym.trainer.algorithms.aggregation import Denominators
from rollgym.trainer.algorithms.filter_settings import RewardSettings
from rollgym.trainer.algorithms.kl import kl_estimate

Found = Mapping[str, Any]
MODES = {
    "grpo": "seq-mean-token-mean",
    "sapo": "seq-mean-token-mean",
    "gmpo": "seq-mean-token-mean",
    "luspo": "seq-mean-token-sum",
    "dr_grpo": "seq-mean-token-sum-norm",
}


def surrogate(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return our surrogate, ratio and aggregation."""
    kind, level = options["loss_type"], options["importance_sampling_level"]
    low, high = options["epsilon_low"], options["epsilon_high"]
    mode = MODES.get(kind, "token-mean")
    parts: dict[str, Any] = {"ratio": {"level": level}, "aggregation": {"mode": mode}}
    if kind == "dr_grpo":
        parts["aggregation"]["horizon"] = options["max_completion_length"]
    match kind:
        case "cispo":
            parts["surrogate"] = {"kind": "weighted", "weight_high": high}
        case "sapo":
            positive, negative = options["sapo_temperature_pos"], options["sapo_temperature_neg"]
            parts["surrogate"] = {"kind": "sapo", "tau_positive": positive, "tau_negative": negative}
        case "vespo":
            parts["ratio"] = {"level": "sequence_sum"}
            parts["surrogate"] = {
                "kind": "vespo",
                "k_positive": options["vespo_k_pos"],
                "rate_positive": options["vespo_lambda_pos"],
                "k_negative": options["vespo_k_neg"],
                "rate_negative": options["vespo_lambda_neg"],
            }
        case "gmpo":
            parts["ratio"] = {"level": "sequence"}
            parts["surrogate"] = {"kind": "gmpo", "clip_low": low, "clip_high": high}
        case _:
            parts["surrogate"] = {
                "kind": "ppo",
                "clip_low": low,
                "clip_high": high,
                "dual_clip": options["delta"],
            }
    return parts


def correction(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return our correction: of vLLM's mismatch, or of sequences that are off-policy."""
    threshold = options["off_policy_mask_threshold"]
    if threshold is not None:
        rejected = {"level": "sequence", "measure": "k1", "high": threshold}
        return {"kind": "reject", "reject": [{**rejected, "only_negative": True, "policy": "current"}]}
    mode = options.get("vllm_importance_sampling_mode")
    if mode is None:
        return {"kind": "off"}
    level, _, action = mode.partition("_")
    low, high = (options[f"vllm_importance_sampling_clip_{end}"] for end in ("min", "max"))
    if action == "truncate":
        return {"kind": "truncate", "level": level, "cap": high, "floor": low or 0.0}
    return {"kind": "band", "level": level, "low": low or 0.0, "high": high}


def policy(case: Case) -> Found:
    """A policy loss: TRL's means over sequences count those without tokens, too."""
    options = case.options
    parts = surrogate(options)
    quantile = options["top_entropy_quantile"]
    if quantile < 1.0:
        parts["selection"] = {"kind": "high_entropy", "fraction": quantile}
    if options["beta"]:
        parts["kl"] = {"coefficient": options["beta"], "unbiased": options["use_bias_correction_kl"]}
    settings = algorithm(
        **parts,
        correction=correction(options),
        entropy_coefficient=options["entropy_coef"],
        minibatches=2,
    )
    further = {"entropy": case["entropy"]}
    if "reference" in case.inputs:
        further["reference_logprobs"] = case["reference"]
    counts = Denominators(int(case.mask.sum()), rows=len(case.mask))
    return {"loss": loss(settings, by_token(case), counts=counts, **further)}


def by_token(case: Case) -> Case:
    """Return the case with its rows' advantages at each token."""
    spread = case["advantages"][:, None].expand(case.mask.shape)
    return replace(case, inputs={**case.inputs, "advantages": spread})


def rloo(case: Case) -> Found:
    """RLOO's loss: the ratio of a sequence is the product of its tokens'."""
    options = case.options
    settings = algorithm(
        surrogate={"kind": "ppo", "clip_low": options["epsilon_low"], "clip_high": options["epsilon_high"]},
        ratio={"level": "sequence_sum"},
        aggregation={"mode": "seq-mean-token-mean"},
        minibatches=2,
    )
    counts = Denominators(int(case.mask.sum()), rows=len(case.mask))
    return {"loss": loss(settings, by_token(case), counts=counts)}


def added(case: Case) -> Tensor:
    """Return rewards added up by their weights."""
    return case["rewards"] @ torch.tensor(case.options["reward_weights"], dtype=torch.float64)


def grpo_advantages(case: Case) -> Found:
    """Rewards added, then relative to the group."""
    scale = {"group": "group_std", "batch": "batch_std", "none": "none"}[case.options["scale_rewards"]]
    found = group_advantages(added(case), case["groups"], scale=scale, epsilon=1e-4)
    return {"advantages": found}


def gdpo(case: Case) -> Found:
    """Each reward relative to the group, then added, then whitened over trajectories."""
    found = gdpo_advantages(
        case["rewards"].T, case["groups"], weights=case.options["reward_weights"], epsilon=1e-4
    )
    one = torch.zeros_like(case["groups"])
    return {"advantages": group_advantages(found, one, epsilon=1e-4)}


def rloo_advantages(case: Case) -> Found:
    """RLOO's, with KL in the reward."""
    options = case.options
    low, high = options["reward_clip_range"] or (None, None)
    scores = shaped(RewardSettings(turn_low=low, turn_high=high), case["rewards"][:, 0])
    kl = {"coefficient": options["beta"], "estimator": "k1", "placement": "reward"} if options["beta"] else {}
    settings = algorithm(advantage={"kind": "group", "baseline": "leave_one_out", "scale": "none"}, kl=kl)
    rows = {"old_logprobs": case["old"], "reference_logprobs": case["reference"]}
    found = advantages(settings, *widened(case, scores), **{name: wide(each) for name, each in rows.items()})
    result = found.advantages[:, -1]
    if options["normalize_advantages"]:
        result = group_advantages(result, torch.zeros_like(case["groups"]), epsilon=1e-4)
    return {"advantages": result}


def widened(case: Case, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return mask, scores and groups with one more token in each row, so that none is without."""
    return torch.cat([case.mask, torch.ones_like(case.mask[:, :1])], dim=1), scores, case["groups"]


def wide(logprobs: Tensor) -> Tensor:
    """Return log-probabilities with one more token, of which all policies are certain."""
    return torch.cat([logprobs, torch.zeros_like(logprobs[:, :1])], dim=1)


class _Losses(dict[str, Any]):
    """All losses of the GRPO trainer have one adapter."""

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or str(name).startswith("loss/")

    def __missing__(self, name: str) -> Any:
        return policy


def k3_is_large(case: Case) -> bool:
    """Whether some token's k3 is above what ours is bounded by."""
    if "reference" not in case.inputs:
        return False
    found = kl_estimate(case["logprobs"], case["reference"], "k3", bounded=False)
    return bool((found[case.mask] > 10.0).any())


PEER = Peer(
    adapters=_Losses(
        {
            "loss/rloo": rloo,
            "advantage/grpo sum_then_normalize": grpo_advantages,
            "advantage/grpo normalize_then_sum": gdpo,
            "advantage/rloo": rloo_advantages,
        }
    ),
    choices=(
        Choice(
            ("loss/gmpo", "loss/rloo"),
            "a row without tokens adds nothing, where theirs is the ratio 1 times its advantage",
            lambda case: bool((case.mask.sum(dim=1) == 0).any()),
        ),
        Choice(
            ("loss/vespo with",),
            "VESPO: a correction multiplies the loss; with proximal behaviour the kernel reads the whole ratio",
        ),
        Choice(("loss/",), "k3 within +-20 and at most 10", k3_is_large),
        Choice(
            ("loss/grpo and beta use_bias_correction_kl",),
            "ratio of a sequence: its token form, whose gradient is that of the row mean where what it multiplies "
            "is one number in a row",
            lambda case: case.options["importance_sampling_level"] == "sequence",
        ),
        Choice(
            ("loss/grpo and entropy_coef",),
            "entropy bonus: in the aggregation's mode over all tokens, not a mean over those that are chosen",
        ),
    ),
)
