"""Ours beside RLinf's functions."""

import torch

from peers.algorithms.ours import Case, Choice, Peer, advantages, algorithm, loss
from peers.algorithms.ours_siirl import has_empty_row
from peers.algorithms.ours_verl import ESTIMATORS, Found, kl_penalty
from rollgym.trainer.algorithms.advantages import generalized_advantages, group_advantages, whitened
from rollgym.trainer.algorithms.aggregation import Denominators, aggregate
from rollgym.trainer.algorithms.corrections import version_shares
from rollgym.trainer.algorithms.losses import ppo_surrogate
from rollgym.trainer.algorithms.objective import critic_loss
from rollgym.trainer.algorithms.ratio import log_ratio


def grpo(case: Case) -> Found:
    """Advantages in groups."""
    found = advantages(algorithm(advantage={"kind": "group"}), case.mask, case["scores"], case["groups"])
    return {"advantages": found.advantages}


def gae(case: Case) -> Found:
    """GAE through every column, with the reward in the last one."""
    rewards = torch.zeros(case.mask.shape, dtype=torch.float64)
    rewards[:, -1] = case["scores"]
    options = case.options
    found, returns = generalized_advantages(
        rewards,
        case["values"],
        case.mask,
        gamma=options["gamma"],
        gae_lambda=options["gae_lambda"],
        gae_mask="none",
    )
    if options["normalize_advantages"]:
        found = whitened(found, case.mask, form="deviation", epsilon=1e-5)
    return {"advantages": found, "returns": returns}


def reinpp(case: Case) -> Found:
    """Returns of tokens, whitened as by OpenRLHF."""
    options = case.options
    kl = {}
    if options["kl_beta"]:
        kl = {
            "coefficient": options["kl_beta"],
            "estimator": options["kl_penalty_type"],
            "placement": "reward",
        }
    settings = algorithm(
        advantage={
            "kind": "token_return",
            "whiten_unbiased": False,
            "whiten_form": "floor",
        },
        kl=kl,
    )
    found = advantages(
        settings,
        case.mask,
        case["scores"],
        case["groups"],
        old_logprobs=case["old"],
        reference_logprobs=case["reference"],
    )
    return {"advantages": found.advantages}


def raw(case: Case) -> Found:
    """Scores as they are, or whitened over tokens."""
    whiten = {"whiten": True, "whiten_form": "deviation", "whiten_epsilon": 1e-5}
    chosen = whiten if case.options["normalize_advantages"] else {}
    settings = algorithm(advantage={"kind": "group", "baseline": "none", "scale": "none", **chosen})
    return {"advantages": advantages(settings, case.mask, case["scores"], case["groups"]).advantages}


def grpo_dynamic(case: Case) -> Found:
    """Advantages of turns: their episode's among episodes, or their own among all turns of the task."""
    episode = case["episode"]
    task = episode // case.options["group_size"]
    if case.options["advantage_mode"] == "turn":
        found = group_advantages(case["scores"], task)
    else:
        first = torch.cat([torch.tensor([True]), episode[1:] != episode[:-1]])
        found = group_advantages(case["scores"][first], task[first])[episode]
    return {"advantages": found[:, None].expand(case.mask.shape)}


def counts(case: Case) -> Denominators:
    """Return counts of all rows, those without tokens too."""
    return Denominators(int(case.mask.sum()), len(case.mask))


def loss_agg(case: Case) -> Found:
    """One number."""
    return {"loss": aggregate(case["values"], case.mask, case.options["loss_agg"], counts(case))}


def surrogate(case: Case) -> dict[str, object]:
    """Return our parts of the policy's loss."""
    options = case.options
    mode = "seq-mean-token-mean" if "max_episode_steps" in options else options["loss_agg"]
    parts: dict[str, object] = {
        "surrogate": {
            "kind": "ppo",
            "clip_low": options["clip_ratio_low"],
            "clip_high": options["clip_ratio_high"],
            "dual_clip": options["clip_ratio_c"],
        },
        "aggregation": {"mode": mode},
    }
    if "clip_log_ratio_max" in options:
        parts["ratio"] = {"clamp": options["clip_log_ratio_max"]}
    return parts


def actor(case: Case) -> Found:
    """The policy's loss."""
    return {"loss": loss(algorithm(**surrogate(case)), case, counts=counts(case))}


def scaled(case: Case) -> Found:
    """The policy's loss of weighted rows: a sequence is a turn, or all turns of an agent in an episode."""
    options, tokens = case.options, case.mask.sum(dim=1)
    own = [tuple(pair) for pair in torch.stack([case["episode"], case["agent"]], 1).tolist()]
    turns = torch.tensor([own.count(each) for each in own])
    agents = torch.tensor([len({pair for pair in own if pair[0] == each[0]}) for each in own])
    lengths, weights = None, 1.0 / (agents * turns)
    if "turn_level" in options["scales"]:
        weights = 1.0 / agents
        lengths = torch.stack([tokens[[other == each for other in own]].sum() for each in own])
    flat = torch.zeros_like(case.mask, dtype=torch.int64)
    found = ppo_surrogate(
        log_ratio(case["logprobs"], case["old"], case.mask, flat),
        case["advantages"],
        clip_low=options["clip_ratio_low"],
        clip_high=options["clip_ratio_high"],
        dual_clip=options["clip_ratio_c"],
    )
    counts = Denominators(int(tokens.sum()), options["episodes"])
    mode = "seq-mean-token-mean"
    return {"loss": aggregate(found.loss * weights[:, None], case.mask, mode, counts, lengths=lengths)}


def decoupled(case: Case) -> Found:
    """Decoupled PPO; a weight above the threshold drops its token."""
    correction: dict[str, object] = {"kind": "truncate", "cap": None}
    if "behave_weight_threshold" in case.options:
        correction = {"kind": "band", "low": 0.0, "high": case.options["behave_weight_threshold"]}
    inputs = {**case.inputs, "behaviour": case["old"]}
    if "versions" not in inputs:
        inputs["old"] = inputs.get("proximal", case["old"])
        settings = algorithm(**surrogate(case), correction=correction)
        return {"loss": loss(settings, Case(case.function, case.options, inputs), counts=counts(case))}
    shares = version_shares(case["versions"], int(case.options["current_version"]))
    settings = algorithm(**surrogate(case), correction=correction, proximal="interpolated")
    return {
        "loss": loss(settings, Case(case.function, case.options, inputs), counts=counts(case), shares=shares)
    }


def critic(case: Case) -> Found:
    """The critic's loss."""
    settings = algorithm(
        advantage={"kind": "gae"},
        critic={
            "value_clip": case.options["value_clip"],
            "loss": "huber",
            "huber_delta": case.options["huber_delta"],
        },
        aggregation={"mode": "token-mean"},
    )
    found, _ = critic_loss(
        settings, case["values"], case["old_values"], case["returns"], case.mask, counts(case)
    )
    return {"loss": found}


PEER = Peer(
    adapters={
        "advantage/grpo": grpo,
        "advantage/gae": gae,
        "advantage/reinpp": reinpp,
        "advantage/raw": raw,
        "advantage/grpo_dynamic trajectory": grpo_dynamic,
        "advantage/grpo_dynamic turn": grpo_dynamic,
        **{
            f"loss_agg/{mode}": loss_agg
            for mode in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")
        },
        "loss/actor": actor,
        "loss_scale/agent_level": scaled,
        "loss_scale/turn_level": scaled,
        "loss/decoupled actor": decoupled,
        "loss/critic": critic,
        **{f"kl_penalty/{name}": kl_penalty for name in ESTIMATORS},
    },
    choices=(
        Choice(
            ("advantage/gae",),
            "a reward lies on a sampled token, RLinf's in the last column, padding or not (docs: token of the reward)",
            lambda case: not bool(case.mask[:, -1].all()),
        ),
        Choice(
            ("advantage/reinpp",),
            "KL is charged at sampled tokens, RLinf's at every column (docs: KL at observations)",
            lambda case: case.options["kl_beta"] > 0 and not bool(case.mask.all()),
        ),
        Choice(
            ("loss/", "loss_agg/seq-mean-token-mean"),
            "an episode without tokens counts 0, not 0 / 0 (docs: row means)",
            has_empty_row,
        ),
        Choice(
            ("loss/decoupled",),
            "rejected tokens stay in the denominator (docs: rejected tokens)",
            lambda case: "behave_weight_threshold" in case.options,
        ),
        Choice(
            ("loss/actor",),
            "log ratios are bounded alike on both sides (docs: bound of log ratios)",
            lambda case: "clip_log_ratio_max" in case.options and "clip_log_ratio_min" not in case.options,
        ),
    ),
)
