"""Ours beside ms-swift's GRPO trainer and its functions."""

from collections.abc import Mapping
from typing import Any

import torch

from peers.algorithms.ours import Case, Choice, Peer, algorithm, loss
from rollgym.trainer.algorithms.advantages import gdpo_advantages, group_advantages, group_statistics
from rollgym.trainer.algorithms.aggregation import Denominators
from rollgym.trainer.algorithms.distillation import divergence
from rollgym.trainer.algorithms.group_filters import ZeroVarianceFilter
from rollgym.trainer.algorithms.kl import kl_estimate
from rollgym.trainer.algorithms.selection import filter_groups

Found = Mapping[str, Any]
MODES = {
    "bnpo": "token-mean",
    "dapo": "token-mean",
    "cispo": "token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
}
BASELINES = {"grpo": "mean", "rloo": "leave_one_out", "reinforce_plus_plus": "mean"}
# Beside REINFORCE++ its "gdpo" scales nothing.
SCALES = {"group": "group_std", "batch": "batch_std", "none": "none", "gdpo": "none"}


def correction(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return our correction: of the mismatch, or of sequences that are off-policy."""
    delta, mode = options["off_policy_sequence_mask_delta"], options["rollout_importance_sampling_mode"]
    bound = options["rollout_importance_sampling_threshold"]
    if delta is not None:
        rejected = {"level": "sequence", "measure": "k1", "high": delta}
        return {"kind": "reject", "reject": [{**rejected, "only_negative": True, "policy": "current"}]}
    match mode:
        case None:
            return {"kind": "off"}
        case "token_truncate" | "sequence_truncate":
            level = "token" if mode == "token_truncate" else "geometric"
            return {"kind": "truncate", "level": level, "cap": bound}
        case "token_mask":
            return {"kind": "band", "low": 0.0, "high": bound}
        case _:
            rejected = {"level": "sequence", "measure": "ratio", "high": bound}
            return {"kind": "truncate", "cap": None, "reject": [rejected]}


def surrogate(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return our surrogate."""
    low, high = options["epsilon_low"], options["epsilon_high"]
    match options["loss_type"]:
        case "cispo":
            return {"kind": "weighted", "weight_high": high}
        case "sapo":
            return {"kind": "sapo", "tau_positive": options["tau_pos"], "tau_negative": options["tau_neg"]}
        case _:
            return {"kind": "ppo", "clip_low": low, "clip_high": high, "dual_clip": options["delta"]}


def policy(case: Case) -> Found:
    """A policy loss: means over sequences count those without tokens, too."""
    options = case.options
    mode = MODES.get(options["loss_type"], "seq-mean-token-mean")
    aggregation: dict[str, Any] = {"mode": mode}
    if options["loss_type"] == "dr_grpo":
        aggregation["horizon"] = options["max_completion_length"]
    parts: dict[str, Any] = {}
    if options["top_entropy_quantile"] < 1.0:
        parts["selection"] = {"kind": "high_entropy", "fraction": options["top_entropy_quantile"]}
    if options["beta"]:
        parts["kl"] = {"coefficient": options["beta"]}
    settings = algorithm(
        surrogate=surrogate(options),
        ratio={"level": options["importance_sampling_level"].partition("_")[0]},
        aggregation=aggregation,
        correction=correction(options),
        minibatches=2,
        **parts,
    )
    further = {"entropy": case["entropy"]}
    if "reference" in case.inputs:
        further["reference_logprobs"] = case["reference"]
    if "truncated" in case.inputs:
        # The episodes filter leaves them out: they are no rows of the step.
        kept = ~case["truncated"]
        inputs = {
            name: each[kept] if isinstance(each, torch.Tensor) and len(each) == len(kept) else each
            for name, each in case.inputs.items()
        }
        case = Case(case.function, case.options, inputs)
        further = {name: each[kept] for name, each in further.items()}
    counts = Denominators(int(case.mask.sum()), rows=len(case.mask))
    return {"loss": loss(settings, case, counts=counts, **further)}


def grouped(case: Case) -> Found:
    """compute_advantages; with several rewards each by its own, as GDPO does it."""
    options = case.options
    scores = case["rewards"] @ torch.tensor(options["reward_weights"], dtype=torch.float64)
    if options["scale_rewards"] == "gdpo" and options["advantage_estimator"] != "reinforce_plus_plus":
        found = gdpo_advantages(
            case["rewards"].T, case["groups"], weights=options["reward_weights"], epsilon=1e-8
        )
        return {"advantages": group_advantages(found, torch.zeros_like(case["groups"]), epsilon=1e-8)}
    if "kl" in case.inputs:
        scores = scores - options["beta"] * case["kl"]
    return {"advantages": relative(options, scores, case["groups"])}


def relative(options: Mapping[str, Any], scores: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Return advantages of scores; REINFORCE++ divides by the deviation of what is centred."""
    scale = SCALES[options["scale_rewards"]]
    if options["advantage_estimator"] == "reinforce_plus_plus" and scale == "batch_std":
        scale = "centred_std"
    baseline = BASELINES[options["advantage_estimator"]]
    return group_advantages(scores, groups, baseline=baseline, scale=scale, epsilon=1e-4)


def dynamic(case: Case) -> Found:
    """compute_advantages_dynamic: a trajectory counts once, whatever rows it has."""
    rewards, requests = case["rewards"][:, 0], case["requests"]
    firsts = [int((requests == each).nonzero()[0]) for each in torch.unique(requests)]
    found = relative(case.options, rewards[firsts], case["groups"][firsts])
    place = torch.searchsorted(torch.unique(requests), requests)
    return {"advantages": found[place]}


def deviation(case: Case) -> Found:
    """compute_std_for_dynamic_sampling, and which groups it keeps."""
    groups, scores = case["groups"], case["rewards"][:, 0]
    kept = filter_groups(ZeroVarianceFilter(kind="zero_variance"), groups.tolist(), scores.tolist()).kept
    return {
        "std": group_statistics(scores, groups).std,
        "kept": torch.tensor([float(group in kept) for group in groups.tolist()]),
    }


def jsd(case: Case) -> Found:
    """jsd_loss: at the ends of beta the two divergences."""
    beta = case.options["beta"]
    kind = {0.0: "forward_kl", 1.0: "reverse_kl"}.get(beta, "jsd")
    student, teacher = (torch.log_softmax(case[name], dim=-1) for name in ("student", "teacher"))
    return {"loss": divergence(student, teacher, kind, beta).sum()}


def taught(case: Case) -> Found:
    """expand_advantage_to_per_token: k1 to the teacher taken off."""
    coefficient = case.options["teacher_kl_coef"]
    return {
        "advantages": case["scores"][:, None]
        - coefficient * kl_estimate(case["old"], case["reference"], "k1")
    }


def teacher_kl(case: Case) -> Found:
    """compute_teacher_kl_per_token."""
    return {"kl": kl_estimate(case["logprobs"], case["reference"], "k3", bounded=False)}


PEER = Peer(
    adapters={
        **{
            f"loss/{name}": policy
            for name in (
                *("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "gspo", "delta", "beta"),
                *("top_entropy_quantile", "overlong_filter", "off_policy_sequence_mask"),
                "rollout_importance_sampling",
            )
        },
        **{f"advantage/{name}": grouped for name in BASELINES},
        **{f"advantage/dynamic {name}": dynamic for name in BASELINES},
        "advantage/expand_advantage_to_per_token": taught,
        "kl/teacher": teacher_kl,
        "loss/jsd": jsd,
        "filter/dynamic_sampling": deviation,
    },
    choices=(
        Choice(
            ("loss/real", "loss/sdar", "advantage/apply_rlsd_reweight"),
            "not offered: REAL, SDAR, RLSD",
        ),
        Choice(("loss/fipo",), "FIPO: weights of a step's tokens are `selection: custom`"),
        Choice(
            ("loss/overlong_filter",),
            "episodes that are left out are no rows, where theirs stay in the mean over rows",
        ),
    ),
)
