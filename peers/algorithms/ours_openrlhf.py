"""Ours beside OpenRLHF's functions."""

from collections.abc import Mapping
from typing import Any

import torch

from peers.algorithms.ours import Case, Choice, Peer, advantages, algorithm, loss, shaped
from rollgym.trainer.algorithms.advantages import whitened
from rollgym.trainer.algorithms.aggregation import Denominators, aggregate
from rollgym.trainer.algorithms.filter_settings import OverlongSettings, RewardSettings
from rollgym.trainer.algorithms.kl import kl_estimate
from rollgym.trainer.algorithms.loss_settings import KLSettings, PreferenceLossSettings
from rollgym.trainer.algorithms.objective import critic_loss
from rollgym.trainer.algorithms.preference import Replies, bradley_terry_loss, paired_loss
from rollgym.trainer.algorithms.ratio import log_ratio
from rollgym.trainer.algorithms.state import adapted_coefficient

Found = Mapping[str, Any]
MEASURES = {"ratio": "ratio", "binary_kl": "behaviour_kl", "tv": "variation"}
GROUP = {
    "rloo": {"baseline": "leave_one_out", "scale": "none"},
    "reinforce_baseline": {"scale": "none"},
    "group_norm": {"epsilon": 1e-9},
    "dr_grpo": {"scale": "none"},
    "flash_reinforce": {"baseline": "batch_mean", "scale": "none"},
}
ROWS = {"old_logprobs": "logprobs", "reference_logprobs": "reference", "values": "values"}


def correction(case: Case) -> dict[str, Any]:
    """Return our settings of OpenRLHF's correction."""
    level = case.options["is_correction_level"]
    low, high = case.options["is_correction_threshold"]
    if level == "off" or case.options["policy_loss_type"] == "gspo":
        return {"kind": "off"}
    if case.options["is_correction_mode"] == "clip":
        return {"kind": "truncate", "cap": high, "floor": low}
    measure = MEASURES[case.options["is_correction_gating"]]
    if level == "token" and measure == "ratio":
        return {"kind": "band", "low": low, "high": high}
    reject = {"level": "sequence" if level == "seq" else "token", "measure": measure, "high": high}
    if measure == "ratio":
        reject["low"] = low
    return {"kind": "truncate", "cap": None, "reject": [reject]}


def policy(case: Case) -> Found:
    """PolicyLoss: GSPO's ratio is to the policy that sampled, where a correction is asked for."""
    options = case.options
    gspo = options["policy_loss_type"] == "gspo"
    by_token = options.get("token_level_loss", True) and not gspo
    settings = algorithm(
        surrogate={
            "kind": "ppo",
            "clip_low": options.get("clip_eps_low", 0.2),
            "clip_high": options.get("clip_eps_high", 0.2),
            "dual_clip": options.get("dual_clip"),
        },
        ratio={"level": "sequence" if gspo else "token"},
        aggregation={"mode": "token-mean" if by_token else "seq-mean-token-mean"},
        correction=correction(case),
        proximal="behaviour" if gspo and options["is_correction_level"] != "off" else "recomputed",
        minibatches=2,
    )
    return {"loss": loss(settings, case)}


def value(case: Case) -> Found:
    """ValueLoss."""
    mode = "token-mean" if case.options["token_level_loss"] else "seq-mean-token-mean"
    settings = algorithm(
        advantage={"kind": "gae"}, critic={"value_clip": case.options["clip_eps"]}, aggregation={"mode": mode}
    )
    counts = Denominators.from_mask(case.mask)
    names = ("values", "old_values", "returns", "mask")
    return {"loss": critic_loss(settings, *(case[name] for name in names), counts)[0]}


def imitation(case: Case) -> Found:
    """SFTLoss."""
    mode = "token-mean" if case.options["token_level_loss"] else "seq-mean-token-mean"
    return {"loss": aggregate(-case["logprobs"], case.mask, mode, Denominators.from_mask(case.mask))}


def preference(case: Case) -> Found:
    """DPOLoss; its IPO is of whole replies."""
    options = case.options
    chosen = {"kind": "dpo", "beta": options["beta"], "label_smoothing": options["label_smoothing"]}
    if options["ipo"]:
        chosen = {"kind": "ipo", "beta": options["beta"], "average": False}
    ones = torch.ones_like(case["chosen"])
    replies = [Replies(case[name], ones, case[f"{name}_reference"]) for name in ("chosen", "rejected")]
    return {"loss": paired_loss(PreferenceLossSettings.model_validate(chosen), *replies).loss}


def ranking(case: Case) -> Found:
    """PairWiseLoss and LogExpLoss, which are one."""
    return {"loss": bradley_terry_loss(case["chosen"], case["rejected"], case.inputs.get("margin"))}


def divergence(case: Case) -> Found:
    """compute_approx_kl."""
    weight = None
    if "old" in case.inputs:
        turn = torch.zeros(case.mask.shape, dtype=torch.int64)
        weight = log_ratio(case["logprobs"], case["old"], torch.ones_like(case.mask), turn)
    found = kl_estimate(
        case["logprobs"],
        case["reference"],
        case.options["kl_estimator"],
        straight_through=case.options["unbiased_gradient"],
        log_ratio=weight,
        gradient_cap=10.0 if "old" in case.inputs else None,
        limit=10.0,
    )
    return {"kl": found, "loss": found[case.mask].sum()}


def controller(case: Case) -> Found:
    """AdaptiveKLController."""
    options = case.options
    settings = KLSettings(
        coefficient=options["init_kl_coef"], target=options["target"], horizon=options["horizon"]
    )
    found = adapted_coefficient(options["init_kl_coef"], case["current"], case["n_steps"], settings)
    return {"coefficient": found}


def normalised(case: Case) -> Found:
    """masked_normalize over a whole batch."""
    return {"normalised": whitened(case["values"], case.mask, unbiased=False, form="floor")}


def token_advantages(case: Case) -> Found:
    """GAE and REINFORCE, with KL at its token; GAE steps through observations, as theirs does."""
    options = case.options
    low, high = options["clip_range"] or (None, None)
    chosen = {"kind": "token_return", "gamma": options["gamma"], "return_mask": "none"}
    if options["estimator"] == "gae":
        chosen = {
            "kind": "gae",
            "gamma": options["gamma"],
            "gae_lambda": options["lambd"],
            "gae_mask": "none",
        }
    parts = {
        "critic": {} if options["estimator"] == "gae" else None,
        "reward": {"turn_low": low, "turn_high": high},
        "kl": penalty(case),
    }
    return both(case, chosen, **parts)


def both(case: Case, chosen: Mapping[str, Any], **parts: Any) -> Found:
    """Return advantages, whitened as OpenRLHF whitens, and what they were before."""
    rows = {name: case[place] for name, place in ROWS.items() if place in case.inputs}
    given = (case.mask, case["scores"], case["groups"])
    whiten = case.options["estimator"] in ("gae", "reinforce", "reinforce_baseline")
    form: dict[str, Any] = {"whiten_unbiased": False, "whiten_form": "floor"}
    if case.options["no_std_norm"]:
        form = {"whiten_form": "mean"}
    white = {"whiten": True, **form} if whiten else {}
    found = advantages(algorithm(advantage={**chosen, **white}, **parts), *given, **rows)
    plain = advantages(algorithm(advantage={**chosen, "whiten": False}, **parts), *given, **rows)
    returns = plain.advantages if plain.returns is None else plain.returns
    return {"advantages": found.advantages, "returns": returns}


def penalty(case: Case) -> dict[str, Any]:
    """Return our settings of the KL in the reward."""
    placement = "reward" if case.options["estimator"] in ("gae", "reinforce") else "return"
    coefficient = case.options["kl_coef"]
    return {"coefficient": coefficient, "estimator": "k1", "placement": placement} if coefficient else {}


def group_advantages(case: Case) -> Found:
    """Advantages of episodes in their groups, KL at its token after the baseline."""
    bounds = case.options["clip_range"]
    chosen = {"kind": "group", **GROUP[case.options["estimator"]], "clip": bounds[1] if bounds else None}
    return both(case, chosen, kl=penalty(case))


def overlong(case: Case) -> Found:
    """The soft penalty on long replies."""
    options = case.options
    settings = RewardSettings(
        overlong=OverlongSettings(
            max_tokens=options["max_new_tokens"],
            buffer_tokens=options["overlong_buffer_len"],
            penalty=options["overlong_penalty_factor"],
        )
    )
    return {"rewards": shaped(settings, case["rewards"], lengths=case["lengths"])}


def stopped(case: Case) -> Found:
    """The penalty on what was cut off: a factor, or below 0 what it earns."""
    coefficient = case.options["stop_properly_penalty_coef"]
    chosen = {"truncated_scale": coefficient} if coefficient >= 0 else {"truncated_reward": coefficient}
    settings = RewardSettings.model_validate(chosen)
    return {"rewards": shaped(settings, case["rewards"], truncated=case["truncated"])}


PEER = Peer(
    adapters={
        "loss/policy ppo": policy,
        "loss/policy gspo": policy,
        "loss/value": value,
        "loss/sft": imitation,
        "loss/dpo": preference,
        "loss/log_exp": ranking,
        "loss/pair_wise": ranking,
        "kl/compute_approx_kl": divergence,
        "kl/adaptive_controller": controller,
        "advantage/masked_normalize": normalised,
        "advantage/gae": token_advantages,
        "advantage/reinforce": token_advantages,
        **{f"advantage/{name}": group_advantages for name in GROUP},
        "reward/overlong_penalty": overlong,
        "reward/stop_properly_penalty": stopped,
    },
    choices=(
        Choice(
            tuple(f"advantage/{name}" for name in GROUP),
            "advantage.clip bounds what is made at the end, not centred rewards before KL and whitening",
            lambda case: (
                case.options["clip_range"] is not None
                and (case.options["kl_coef"] > 0 or case.options["estimator"] == "reinforce_baseline")
            ),
        ),
    ),
)
