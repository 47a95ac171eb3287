"""Record Trinity-RFT's functions, in an interpreter that has Trinity-RFT (0.6.0):

PYTHONPATH=. PYTHON -m peers.algorithms.record_trinity_rft --out CASES
"""

import itertools
from types import SimpleNamespace
from typing import Any

import torch

from peers.algorithms.absent import AbsentPackages
from peers.algorithms.batches import drawn_double, drawn_single, recorder_of
from peers.algorithms.cases import Draw, Recorder

AbsentPackages("verl").install()

from trinity.algorithm import utils
from trinity.algorithm.advantage_fn import (
    asymre_advantage,
    clipb_advantage,
    clipv_advantage,
    gigpo_advantage,
    grpo_advantage,
    jsd_advantage,
    multi_step_grpo_advantage,
    on_policy_distill_advantage,
    opmd_advantage,
    ppo_advantage,
    rec_advantage,
    reinforce_advantage,
    reinforce_plus_plus_advantage,
    remax_advantage,
    rloo_advantage,
)
from trinity.algorithm.kl_fn import kl_fn
from trinity.algorithm.policy_loss_fn import (
    chord_policy_loss,
    cispo_policy_loss,
    dpo_loss,
    gspo_policy_loss,
    importance_sampling_policy_loss,
    mix_policy_loss,
    opmd_policy_loss,
    ppo_policy_loss,
    rec_policy_loss,
    sapo_policy_loss,
    sft_loss,
    sppo_loss_fn,
    topr_policy_loss,
)
from trinity.common.experience import EID

MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")

GROUPED: list[tuple[str, Any, dict[str, Any]]] = [
    ("grpo", grpo_advantage.GRPOGroupedAdvantage, {}),
    ("grpo", grpo_advantage.GRPOGroupedAdvantage, {"std_cal_level": "batch"}),
    ("grpo", grpo_advantage.GRPOGroupedAdvantage, {"epsilon": 1e-4, "std_threshold": 0.0}),
    ("grpo rank penalty", grpo_advantage.GRPOGroupedAdvantage, {"rank_penalty": 0.25}),
    ("opmd", opmd_advantage.OPMDGroupAdvantage, {}),
    ("opmd", opmd_advantage.OPMDGroupAdvantage, {"opmd_baseline": "logavgexp", "tau": 0.5}),
    ("reinforce", reinforce_advantage.REINFORCEGroupAdvantage, {}),
    ("asymre", asymre_advantage.ASYMREGroupAdvantage, {"baseline_shift": -0.1}),
    ("rec", rec_advantage.RECGroupedAdvantage, {}),
    ("rec", rec_advantage.RECGroupedAdvantage, {"std_normalize": True}),
]

LOSSES: list[tuple[str, Any, list[dict[str, Any]]]] = [
    (
        "ppo",
        ppo_policy_loss.PPOPolicyLossFn,
        [
            {"clip_range": 0.2},
            {"clip_range_low": 0.2, "clip_range_high": 0.28, "clip_ratio_c": 10.0},
            {"clip_range": 0.2, "enable_sequence_masking": True, "delta_sequence_masking": 0.1},
            {"clip_range": 0.2, "fallback_to_policy_gradient": True},
        ],
    ),
    (
        "gspo",
        gspo_policy_loss.GSPOLossFn,
        [{"clip_range_low": 3e-4, "clip_range_high": 4e-4}, {"clip_range": 0.2}],
    ),
    ("importance_sampling", importance_sampling_policy_loss.ImportanceSamplingLossFn, [{}]),
    ("opmd", opmd_policy_loss.OPMDPolicyLossFn, [{"tau": 1.0}, {"tau": 0.0}]),
    (
        "cispo",
        cispo_policy_loss.CISPOPolicyLossFn,
        [
            {},
            {"clip_range_low": 0.2, "clip_range_high": 0.2},
            {"enable_mask_clip": True, "mask_clip_range_low": 0.2},
        ],
    ),
    ("sapo", sapo_policy_loss.SAPOPolicyLossFn, [{}, {"tau_pos": 0.5, "tau_neg": 2.0}]),
    ("sppo", sppo_loss_fn.sPPOPolicyLossFn, [{}, {"epsilon": 0.1}]),
    ("topr", topr_policy_loss.TOPRPolicyLossFn, [{}, {"advantage_threshold": 0.3}]),
    ("sft", sft_loss.SFTLossFn, [{}]),
    ("sft_is", chord_policy_loss.SFTISLossFn, [{}]),
    ("sft_phi", chord_policy_loss.SFTPhiLossFn, [{}, {"cutoff_prob": 0.8}]),
]

REC: list[dict[str, Any]] = [
    {},
    {"weight": "importance_sampling"},
    {"clip_mode": "two-side"},
    {"clip_mode": "one-side", "weight": "importance_sampling"},
    {"clip_mode": "one-side", "weight": "importance_sampling", "epsilon_high": 0.28},
    {"clip_mode": "gspo-one-side", "weight": "gspo_importance_sampling"},
    {"clip_mode": "ring"},
    {
        "clip_mode": "ring",
        "weight": "importance_sampling",
        "epsilon_low_prime": 0.6,
        "epsilon_high_prime": 2.0,
    },
    {"weight": "advantage", "temp": 2.0},
    {"regularizer": "k2", "regularizer_coef": 0.1},
    {"regularizer": "forward-kl", "regularizer_coef": 0.1},
]


def grouped_advantages(to: Recorder) -> None:
    """Advantages of episodes in their groups."""
    for (name, kind, options), number in itertools.product(GROUPED, range(15)):
        draw = Draw(f"advantage/{name} {options}", number, torch.float32)
        groups = draw.groups(8, alone=name not in ("rec", "opmd"))
        mask = draw.mask(8, 6)
        inputs = {
            "scores": draw.scores(groups),
            "groups": groups,
            "mask": mask,
            "logprobs": draw.logprobs(8, 6),
        }

        made = kind(**options)

        def call(given, made=made):
            experiences = [
                SimpleNamespace(
                    eid=EID(batch=0, task=group, run=row),
                    reward=float(score),
                    action_mask=rows,
                    logprobs=logprobs,
                    row=row,
                )
                for row, (group, score, rows, logprobs) in enumerate(
                    zip(given["groups"], given["scores"], given["mask"], given["logprobs"], strict=True)
                )
            ]
            kept, _ = made.process(experiences)
            advantages = torch.zeros(given["mask"].shape)
            for each in kept:
                advantages[each.row] = each.advantages
            return {"advantages": advantages}

        to.record(f"advantage/{name}", options, inputs, call)


def steps(to: Recorder) -> None:
    """Advantages of episodes of several steps: GiGPO, and GRPO whose last step's reward counts."""
    kinds: list[tuple[str, Any, dict[str, Any]]] = [
        ("gigpo", gigpo_advantage.GiGPOAdvantageFn, {"gamma": 0.95}),
        ("gigpo", gigpo_advantage.GiGPOAdvantageFn, {"gamma": 1.0, "fnorm": "std", "omega": 0.5}),
        ("multi_step_grpo", multi_step_grpo_advantage.StepWiseGRPOAdvantageFn, {}),
        ("multi_step_grpo", multi_step_grpo_advantage.StepWiseGRPOAdvantageFn, {"std_cal_level": "batch"}),
        ("multi_step_grpo", multi_step_grpo_advantage.StepWiseGRPOAdvantageFn, {"enable_step_norm": True}),
    ]
    for (name, kind, options), number in itertools.product(kinds, range(15)):
        draw = Draw(f"advantage/{name} {options}", number, torch.float32)
        groups = draw.groups(8)
        rewards, anchors = [], []
        scores = draw.scores(groups)
        for group, score in zip(groups, scores.tolist(), strict=True):
            length = draw.whole(1, 4)
            rewards.append([draw.whole(-1, 1) * 0.5 for _ in range(length - 1)] + [score])
            # States of another task have another key, as of environments that name them so.
            anchors.append([f"{group} {draw.whole(0, 2)}" for _ in range(length)])

        made = kind(**options)

        def call(given, made=made):
            experiences = [
                SimpleNamespace(
                    eid=EID(batch=0, task=group, run=run, step=step),
                    reward=turns[-1],
                    action_mask=torch.ones(1),
                    info={"step_reward": reward, "env_state_hash": anchor},
                )
                for run, (group, turns, keys) in enumerate(
                    zip(given["groups"], given["turns"], given["anchors"], strict=True)
                )
                for step, (reward, anchor) in enumerate(zip(turns, keys, strict=True))
            ]
            made.process(experiences)
            return {"advantages": torch.tensor([float(each.advantages) for each in experiences])}

        inputs = {"groups": groups, "scores": scores, "turns": rewards, "anchors": anchors}
        to.record(f"advantage/{name}", options, inputs, call)


def token_advantages(to: Recorder) -> None:
    """Advantages of tokens."""
    kinds: list[tuple[str, Any, dict[str, Any]]] = [
        ("gae", ppo_advantage.PPOAdvantageFn, {"gamma": 1.0, "lam": 1.0}),
        ("gae", ppo_advantage.PPOAdvantageFn, {"gamma": 0.99, "lam": 0.95}),
        ("reinforce_plus_plus", reinforce_plus_plus_advantage.REINFORCEPLUSPLUSAdvantageFn, {"gamma": 1.0}),
        ("reinforce_plus_plus", reinforce_plus_plus_advantage.REINFORCEPLUSPLUSAdvantageFn, {"gamma": 0.9}),
        ("remax", remax_advantage.REMAXAdvantageFn, {}),
        ("rloo", rloo_advantage.RLOOAdvantageFn, {}),
        ("clip_b", clipb_advantage.ClipBAdvantageFn, {"mu": 1.0}),
        ("clip_v", clipv_advantage.ClipVAdvantageFn, {"mu": 1.0, "max_frac": 0.5}),
        ("clip_v", clipv_advantage.ClipVAdvantageFn, {"mu": 0.5, "max_frac": 0.05}),
        ("jsd", jsd_advantage.JSDAdvantage, {"lambda_coef": 0.5, "kl_coef": 0.7}),
        ("jsd", jsd_advantage.JSDAdvantage, {"lambda_coef": 0.0}),
        ("on_policy_distill", on_policy_distill_advantage.OnPolicyDistillAdvantage, {"kl_coef": 0.5}),
    ]
    for (name, kind, options), number in itertools.product(kinds, range(15)):
        draw, batch = drawn_double(f"advantage/{name} {options}", number, empty=0.0)
        groups = draw.groups(6)
        scores = draw.scores(groups)
        inputs: dict[str, Any] = {"mask": batch.mask, "groups": groups}
        inputs["rewards"] = draw.rewards(batch.mask, scores, turns=name in ("gae", "remax"))
        if name == "gae":
            inputs["values"] = draw.normal(*batch.mask.shape)
        if name == "remax":
            inputs["greedy"] = draw.normal(max(groups) + 1)[torch.tensor(groups)]
        if name in ("clip_b", "clip_v", "jsd", "on_policy_distill"):
            inputs |= {"old": batch.old, "entropy": batch.entropy, "teacher": batch.reference}
            inputs["cross_entropy"] = batch.entropy * 0.5

        made = kind(**options)

        def call(given, name=name, made=made):
            mask = given["mask"].double()
            data = {
                "token_level_rewards": given["rewards"],
                "response_mask": mask,
                "values": given.get("values"),
                "reward_baselines": given.get("greedy"),
                "old_log_probs": given.get("old"),
                "rollout_log_probs": given.get("old"),
                "entropys": given.get("entropy"),
                "necs": given.get("cross_entropy"),
                "teacher_logprobs": given.get("teacher"),
            }
            made(SimpleNamespace(batch=data, non_tensor_batch={"uid": given["groups"]}))
            found = {"advantages": data["advantages"]}
            if name.startswith("clip"):
                found["kept"] = data["response_mask"]
            return found

        to.record(f"advantage/{name}", options, inputs, call)


def losses(to: Recorder) -> None:
    """Losses of tokens, in all modes of aggregation."""
    for name, kind, choices in LOSSES:
        for number, (options, mode) in itertools.product(range(5), itertools.product(choices, MODES)):
            _, batch = drawn_double(
                f"loss/{name} {options} {mode}", number, empty=0.1 if number == 4 else 0.0
            )
            inputs = batch.of("logprobs", "old", "advantages")
            if name not in ("gspo", "topr"):
                inputs["advantages"] = batch.token_advantages

            made = kind(**options, loss_agg_mode=mode)

            def call(given, made=made):
                mask = given["mask"].double()
                names = {"old_logprob": given["old"], "advantages": given["advantages"]}
                return {"loss": made(logprob=given["logprobs"], action_mask=mask, **names)[0]}

            to.record(
                f"loss/{name}", {**options, "loss_agg_mode": mode}, inputs, call, differentiate=["logprobs"]
            )
    for number, options in itertools.product(range(8), REC):
        _, batch = drawn_double(f"loss/rec {options}", number, empty=0.0)
        made = rec_policy_loss.RECPolicyLossFn(**options)

        def recorded(given, made=made):
            mask = given["mask"].double()
            names = {"old_logprob": given["old"], "advantages": given["advantages"]}
            return {"loss": made(logprob=given["logprobs"], action_mask=mask, **names)[0]}

        def sloped(given, recorded=recorded):
            loss = recorded(given)["loss"]
            return {"loss": loss - loss.detach()}

        inputs = batch.of("logprobs", "old", "advantages")
        to.record("loss/rec", options, inputs, recorded, differentiate=["logprobs"])
        if "one-side" in options.get("clip_mode", ""):
            to.record("loss/rec one-side gradient", options, inputs, sloped, differentiate=["logprobs"])


def mixtures(to: Recorder) -> None:
    """Losses of rows of an expert beside those of the policy, and of preferences."""
    for number, (name, mu, phi) in itertools.product(
        range(10), (("mix", 0.1, False), ("mix_chord", 0.3, True), ("mix_chord", 0.1, False))
    ):
        draw, batch = drawn_double(f"loss/{name} {phi}", number, empty=0.0)
        expert = draw.normal(6) > 0
        expert[0], expert[1] = True, False
        options: dict[str, Any] = {"mu": mu} if name == "mix" else {"mu_peak": mu, "mu_valley": mu}
        if name == "mix_chord":
            options["enable_phi_function"] = phi
        kind = mix_policy_loss.MIXPolicyLossFn if name == "mix" else chord_policy_loss.MIXCHORDPolicyLossFn
        sizes = {
            "train_batch_size_usual": int((~expert).sum()),
            "train_batch_size_expert": int(expert.sum()),
        }
        made = kind(clip_range=0.2, **sizes, **options)

        def mixed(given, made=made):
            return {
                "loss": made(
                    logprob=given["logprobs"],
                    old_logprob=given["old"],
                    action_mask=given["mask"].double(),
                    advantages=given["advantages"],
                    expert_mask=given["expert"],
                    step=torch.full((6,), 5),
                )[0]
            }

        inputs = {**batch.of("logprobs", "old"), "advantages": batch.token_advantages, "expert": expert}
        to.record(f"loss/{name}", {**options, "clip_range": 0.2}, inputs, mixed, differentiate=["logprobs"])
    for number, (beta, smoothing) in itertools.product(range(12), ((0.1, 0.0), (0.5, 0.1))):
        _, batch = drawn_double("loss/dpo", number, empty=0.0)
        options = {"beta": beta, "label_smoothing": smoothing}

        def preferred(given, options=options):
            mask = given["mask"].double()
            names = {"ref_logprob": given["reference"], "action_mask": mask}
            return {"loss": dpo_loss.DPOLossFn(**options)(logprob=given["logprobs"], **names)[0]}

        to.record(
            "loss/dpo", options, batch.of("logprobs", "reference"), preferred, differentiate=["logprobs"]
        )


def divergences(to: Recorder) -> None:
    """KL of tokens and its loss, the controller, and the helpers."""
    kinds = {
        "k1": kl_fn.K1Fn,
        "k2": kl_fn.K2Fn,
        "k3": kl_fn.K3Fn,
        "low_var_kl": kl_fn.LowVarKLFn,
        "abs": kl_fn.AbsFn,
        "corrected_k3": kl_fn.CorrectedK3Fn,
    }
    for (name, kind), number, mode in itertools.product(kinds.items(), range(6), MODES[:3]):
        _, batch = drawn_double(f"kl/{name} {mode}", number, empty=0.0)

        made = kind(kl_coef=0.3)

        def call(given, mode=mode, made=made):
            names = (given["logprobs"], given["reference"])
            loss, _ = made.calculate_kl_loss(*names, given["mask"].double(), mode, given["old"])
            return {"kl": made.calculate_kl(*names, given["old"]), "loss": loss}

        options = {"kl_coef": 0.3, "loss_agg_mode": mode}
        to.record(
            f"kl/{name}", options, batch.of("logprobs", "reference", "old"), call, differentiate=["logprobs"]
        )
    for number, mode in itertools.product(range(8), MODES):
        draw, batch = drawn_double("aggregate", number, empty=0.1)
        values = {"values": draw.normal(*batch.mask.shape), "mask": batch.mask}

        def aggregated(given, mode=mode):
            return {"loss": utils.aggregate_loss(given["values"], given["mask"].double(), mode, 20.0)}

        options = {"loss_agg_mode": mode, "normalizer": 20.0}
        to.record("aggregate/aggregate_loss", options, values, aggregated, differentiate=["values"])

        def whitened(given):
            return {"whitened": utils.masked_whiten(given["values"], given["mask"].double())}

        if mode == MODES[0]:
            to.record("aggregate/masked_whiten", {}, values, whitened)
    for number in range(24):
        _, batch = drawn_single("kl/controller", number)
        made = kl_fn.K1Fn(adaptive=True, kl_coef=0.02, target_kl=0.1, horizon=10000)

        def updated(given, made=made):
            made.update_kl_coef(given["current"][0], 256)
            return {"coefficient": made.kl_coef}

        options = {"kl_coef": 0.02, "target_kl": 0.1, "horizon": 10000, "batch_size": 256}
        current = (batch.reference - batch.logprobs).abs().mean()[None]
        to.record("kl/controller", options, {"current": current}, updated)


if __name__ == "__main__":
    recorder_of(
        "trinity_rft",
        __doc__,
        (grouped_advantages, steps, token_advantages, losses, mixtures, divergences),
    )
