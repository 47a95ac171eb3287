"""Ours beside verl's functions."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from peers.algorithms.ours import Case, Choice, Peer, advantages, algorithm
from peers.algorithms.ours_verl_losses import (
    agg_loss,
    bypass,
    corrected,
    policy,
    rejection,
    value,
    weights,
)
from rollgym.trainer.algorithms.advantages import gdpo_advantages, whitened
from rollgym.trainer.algorithms.corrections import (
    mismatch_metrics,
)
from rollgym.trainer.algorithms.kl import kl_estimate
from rollgym.trainer.algorithms.loss_settings import KLSettings
from rollgym.trainer.algorithms.state import adapted_coefficient
from rollgym.trainer.algorithms.token_credit import optimal_token_baseline_advantages

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
        zero_tail=case.options["handle_zero_tail"],
    )
    return {"advantages": found, "returns": returns}


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


def alone(case: Case) -> Tensor:
    """Return which episodes have no other in their group."""
    _, which, size = torch.unique(case["groups"], return_inverse=True, return_counts=True)
    return size[which] == 1


def in_equal_group(case: Case) -> Tensor:
    """Return which episodes are in a group of equal scores, or alone in theirs."""
    scores, groups = case["rewards"].sum(dim=1), case["groups"]
    together = groups[:, None] == groups[None]
    return ~(together & ((scores[:, None] - scores[None]).abs() > 1e-6)).any(dim=1)


def beside_nothing(case: Case) -> Tensor:
    """Return which episodes have one without tokens in their group."""
    together = case["groups"][:, None] == case["groups"][None]
    return (together & ~case.mask.any(dim=1)[None]).any(dim=1)


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
            lambda case: case.options["norm_adv_by_std_in_grpo"],
            rows=alone,
        ),
        Choice(
            ("advantage/grpo_vectorized",),
            "a deviation up to 1e-6 gives 0 (docs: group of equal returns)",
            rows=in_equal_group,
        ),
        Choice(
            ("advantage/optimal_token_baseline",),
            "an episode without tokens is no member of its group (docs: members of a group)",
            rows=beside_nothing,
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
