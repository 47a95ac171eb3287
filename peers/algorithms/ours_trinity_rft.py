"""Ours beside Trinity-RFT's functions."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from peers.algorithms.ours import Case, Choice, Peer, advantages, algorithm, loss
from rollgym.trainer.algorithms.advantages import generalized_advantages, group_advantages, whitened
from rollgym.trainer.algorithms.aggregation import Denominators, aggregate
from rollgym.trainer.algorithms.gigpo import anchor_groups, gigpo_advantages
from rollgym.trainer.algorithms.kl import kl_estimate
from rollgym.trainer.algorithms.loss_settings import KLSettings
from rollgym.trainer.algorithms.state import adapted_coefficient

Found = Mapping[str, Any]
GROUP = {
    "grpo": {},
    "opmd": {"scale": "none"},
    "reinforce": {"baseline": "none", "scale": "none"},
    "asymre": {"scale": "none"},
    "rec": {"biased": True},
    "rloo": {"baseline": "leave_one_out", "scale": "none"},
}
ESTIMATORS = {"k1": "k1", "k2": "k2", "k3": "k3", "low_var_kl": "k3", "abs": "abs", "corrected_k3": "k3"}
ALONE = "group of one: 0 or the raw score, not the score over the batch's deviation"
_FREE = 1e30
"""A weight that no ratio reaches."""


def grouped(case: Case) -> Found:
    """Advantages of episodes in their groups."""
    name, options = case.function.removeprefix("advantage/"), case.options
    chosen: dict[str, Any] = {"kind": "group", "singleton": "raw", **GROUP[name]}
    if options.get("std_cal_level") == "batch":
        chosen["scale"] = "batch_std"
    if name == "rec" and not options.get("std_normalize"):
        chosen["scale"] = "none"
    if options.get("std_threshold") is not None:
        # Groups that are dropped have no advantage: so have ours without a deviation, and those of one.
        chosen["singleton"] = "zero"
    chosen["epsilon"] = options.get("epsilon", 1e-6)
    chosen["baseline_shift"] = options.get("baseline_shift", 0.0)
    scores = case["scores"] if "scores" in case.inputs else case["rewards"].sum(dim=1)
    found = advantages(algorithm(advantage=chosen), case.mask, scores, case["groups"])
    return {"advantages": found.advantages}


def gigpo(case: Case) -> Found:
    """GiGPO, with statistics of trajectories."""
    options = case.options
    groups = case["groups"].tolist()
    found = gigpo_advantages(
        case["turns"],
        groups,
        anchor_groups(case["anchors"], groups),
        normalise_std=options.get("fnorm") == "std",
        step_weight=options.get("omega", 1.0),
        turn_discount=options["gamma"],
        count_steps=False,
        singleton_raw=True,
    )
    return {"advantages": torch.tensor([each for turns in found for each in turns], dtype=torch.float64)}


def last_step(case: Case) -> Found:
    """The last step's reward relative to the group, for every step."""
    scores = torch.tensor([turns[-1] for turns in case["turns"]], dtype=torch.float64)
    scale = "batch_std" if case.options.get("std_cal_level") == "batch" else "group_std"
    found = group_advantages(scores, case["groups"], scale=scale, singleton="raw")
    counts = torch.tensor([len(turns) for turns in case["turns"]])
    return {"advantages": found.repeat_interleave(counts)}


def gae(case: Case) -> Found:
    """GAE through every column, values of observations and padding read."""
    found, returns = generalized_advantages(
        case["rewards"],
        case["values"],
        case.mask,
        gamma=case.options["gamma"],
        gae_lambda=case.options["lam"],
        gae_mask="none",
    )
    return {"advantages": whitened(found, case.mask), "returns": returns}


def token_returns(case: Case) -> Found:
    """REINFORCE++ and ReMax."""
    chosen: dict[str, Any] = {"kind": "token_return", "return_mask": "none"}
    if "greedy" in case.inputs:
        chosen |= {"baseline": "greedy", "whiten": False}
    chosen["gamma"] = case.options.get("gamma", 1.0)
    found = advantages(
        algorithm(advantage=chosen),
        case.mask,
        case["rewards"],
        case["groups"],
        turns=True,
        greedy=case.inputs.get("greedy"),
    )
    return {"advantages": found.advantages}


def distilled(case: Case) -> Found:
    """k1 to the teacher, taken off."""
    coefficient = case.options.get("kl_coef", 1.0)
    return {"advantages": -coefficient * kl_estimate(case["old"], case["teacher"], "k1")}


def counts(case: Case, mode: str) -> Denominators:
    """Return Trinity's counts: all rows, empty ones too, and with a constant none."""
    rows = 1 if mode == "seq-mean-token-sum-norm" else len(case.mask)
    return Denominators(int(case.mask.sum()), rows=rows)


def surrogate(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return our parts of a policy loss of this name."""
    low = options.get("clip_range_low", options.get("clip_range"))
    high = options.get("clip_range_high", options.get("clip_range"))
    match name:
        case "ppo":
            parts = {
                "surrogate": {
                    "kind": "ppo",
                    "clip_low": low,
                    "clip_high": high,
                    "dual_clip": options.get("clip_ratio_c", 3.0),
                }
            }
            if options.get("enable_sequence_masking"):
                rejected = {"level": "sequence", "measure": "k1", "high": options["delta_sequence_masking"]}
                every = [{**rejected, "only_negative": True, "policy": "current"}]
                parts["correction"] = {"kind": "reject", "reject": every}
            return parts
        case "gspo":
            return {
                "surrogate": {"kind": "ppo", "clip_low": low, "clip_high": high},
                "ratio": {"level": "sequence"},
            }
        case "importance_sampling":
            return {"surrogate": {"kind": "ppo", "clip_low": None, "clip_high": None}}
        case "opmd":
            return {"surrogate": {"kind": "reinforce"}}
        case "cispo":
            low, high = options.get("clip_range_low", 1.0), options.get("clip_range_high", 0.28)
            return {"surrogate": {"kind": "weighted", "weight_low": 1 - low, "weight_high": 1 + high}}
        case "topr":
            threshold = options.get("advantage_threshold", 0.0)
            chosen = {"kind": "weighted", "weight_high": 1.0, "applies_to": "negative_scores"}
            return {"surrogate": {**chosen, "score_threshold": threshold}}
        case _:
            raise ValueError(name)


def policy(case: Case) -> Found:
    """A policy loss."""
    name, options = case.function.removeprefix("loss/"), case.options
    mode = options["loss_agg_mode"]
    aggregation: dict[str, Any] = {"mode": mode}
    if mode == "seq-mean-token-sum-norm":
        aggregation["horizon"] = case.mask.shape[1]
    parts = surrogate(name, options)
    if options.get("fallback_to_policy_gradient"):
        case = replace(case, inputs={**case.inputs, "old": case["logprobs"].detach()})
    steps = 1 if parts["surrogate"]["kind"] == "reinforce" else 2
    settings = algorithm(**parts, aggregation=aggregation, minibatches=steps)
    return {"loss": loss(settings, case, counts=counts(case, mode), scores=case["advantages"][:, 0])}


def imitation(case: Case) -> Found:
    """SFTLossFn."""
    mode = case.options["loss_agg_mode"]
    horizon = case.mask.shape[1]
    return {"loss": aggregate(-case["logprobs"], case.mask, mode, counts(case, mode), horizon=horizon)}


def rec(case: Case) -> Found:
    """RECPolicyLossFn: without a clip."""
    options = case.options
    parts: dict[str, Any] = {"surrogate": {"kind": "reinforce"}}
    steps = 1
    if options.get("weight") == "importance_sampling":
        parts, steps = {"surrogate": {"kind": "weighted", "weight_high": _FREE}}, 2
    if options.get("regularizer") == "k2":
        coefficient = 2 * options["regularizer_coef"]
        parts, steps = {"surrogate": {"kind": "quadratic", "coefficient": coefficient}}, 2
    if options.get("regularizer") == "forward-kl":
        # The likelihood of every episode: all are better than this.
        parts["positive_nll"] = {"coefficient": options["regularizer_coef"], "score_threshold": -_FREE}
    tokens = int(case.mask.sum())
    every = Denominators(tokens, rows=len(case.mask), positive_tokens=tokens)
    settings = algorithm(**parts, minibatches=steps)
    return {"loss": loss(settings, case, counts=every, scores=torch.zeros(len(case.mask)))}


def rec_gradient(case: Case) -> Found:
    """RECPolicyLossFn with a one-sided clip, whose gradient is PPO's; its value is another one."""
    options = case.options
    sequence = options["clip_mode"] == "gspo-one-side"
    clip = {"clip_low": options.get("epsilon_low", 0.2), "clip_high": options.get("epsilon_high", 0.2)}
    settings = algorithm(
        surrogate={"kind": "ppo", **clip},
        ratio={"level": "sequence" if sequence else "token"},
        aggregation={"mode": "seq-mean-token-mean" if sequence else "token-mean"},
        minibatches=2,
    )
    found = loss(settings, case)
    return {"loss": found - found.detach()}


def divergence(case: Case) -> Found:
    """KL of tokens and its loss."""
    name, mode = case.function.removeprefix("kl/"), case.options["loss_agg_mode"]
    found = kl_estimate(
        case["logprobs"],
        case["reference"],
        ESTIMATORS[name],
        bounded=name == "low_var_kl",
        log_ratio=case["logprobs"] - case["old"] if name == "corrected_k3" else None,
    )
    total = aggregate(found, case.mask, mode, counts(case, mode))
    return {"kl": found, "loss": case.options["kl_coef"] * total}


def controller(case: Case) -> Found:
    """The adaptive coefficient."""
    options = case.options
    settings = KLSettings(
        coefficient=options["kl_coef"], target=options["target_kl"], horizon=options["horizon"]
    )
    current, size = float(case["current"][0]), options["batch_size"]
    return {"coefficient": adapted_coefficient(options["kl_coef"], current, size, settings)}


def aggregated(case: Case) -> Found:
    """aggregate_loss."""
    mode = case.options["loss_agg_mode"]
    horizon = int(case.options["normalizer"])
    return {"loss": aggregate(case["values"], case.mask, mode, counts(case, mode), horizon=horizon)}


def alone(case: Case) -> Tensor:
    """Return which episodes are alone in their groups."""
    _, place, count = torch.unique(case["groups"], return_inverse=True, return_counts=True)
    return count[place] == 1


def by_the_batch(case: Case) -> bool:
    """Whether advantages are divided by the batch's deviation."""
    return case.options.get("std_cal_level") == "batch"


def told(name: str, *values: Any) -> Any:
    """Return whether an option is one of these."""
    return lambda case: case.options.get(name) in values


PEER = Peer(
    adapters={
        **{f"advantage/{name}": grouped for name in GROUP},
        "advantage/gigpo": gigpo,
        "advantage/multi_step_grpo": last_step,
        "advantage/gae": gae,
        "advantage/reinforce_plus_plus": token_returns,
        "advantage/remax": token_returns,
        "advantage/jsd": distilled,
        "advantage/on_policy_distill": distilled,
        **{
            f"loss/{name}": policy for name in ("ppo", "gspo", "importance_sampling", "opmd", "cispo", "topr")
        },
        "loss/sft": imitation,
        "loss/rec": rec,
        "loss/rec one-side gradient": rec_gradient,
        **{f"kl/{name}": divergence for name in ESTIMATORS},
        "kl/controller": controller,
        "aggregate/aggregate_loss": aggregated,
        "aggregate/masked_whiten": lambda case: {"whitened": whitened(case["values"], case.mask)},
    },
    choices=(
        Choice(
            ("advantage/grpo rank penalty", "advantage/clip_b", "advantage/clip_v"),
            "not offered: Trinity's rank penalty, Clip_B and Clip_V",
        ),
        Choice(
            ("advantage/opmd",),
            "not offered: OPMD's log-mean-exp baseline",
            told("opmd_baseline", "logavgexp"),
        ),
        Choice(("advantage/jsd",), "not offered: a JSD of sampled tokens", told("lambda_coef", 0.5)),
        Choice(
            ("advantage/multi_step_grpo",),
            ALONE,
            lambda case: by_the_batch(case) and bool(alone(case).any()),
        ),
        Choice(("advantage/grpo",), ALONE, by_the_batch, rows=alone),
        Choice(
            ("advantage/multi_step_grpo",),
            "not offered: advantages over the number of steps",
            told("enable_step_norm", True),
        ),
        Choice(("loss/opmd",), "OPMD's 1 / (1 + tau) is a factor of the learning rate", told("tau", 1.0)),
        Choice(("loss/cispo",), "not offered: a mask beside CISPO's weight", told("enable_mask_clip", True)),
        Choice(("loss/sapo",), "SAPO: the paper's gate and its slope, not a weight of the gate's value"),
        Choice(
            ("loss/sppo", "loss/sft_", "loss/mix", "loss/rec"),
            "not offered: sPPO, REC with a ring, two bounds or weights of advantages (with one bound it has PPO's "
            "gradient), DFT and its kin, a loss of experts beside PPO's",
            lambda case: (
                case.function != "loss/rec"
                or case.options.get("clip_mode", "none") != "none"
                or case.options.get("weight") == "advantage"
            ),
        ),
        Choice(("loss/dpo",), "DPO: each pair by itself, not the sums of all pairs of a batch"),
        Choice(
            ("kl/corrected_k3",),
            "KL times the ratio: the whole ratio, not at most 2",
            lambda case: bool(((case["logprobs"] - case["old"]).exp() > 2.0).any()),
        ),
    ),
)
