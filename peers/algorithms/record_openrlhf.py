"""Record OpenRLHF's functions, in an interpreter that has OpenRLHF (0.11.2):

PYTHONPATH=. PYTHON -m peers.algorithms.record_openrlhf --out CASES
"""

import itertools
from types import SimpleNamespace

import torch

from peers.algorithms.absent import AbsentPackages
from peers.algorithms.batches import drawn_double, drawn_single, recorder_of
from peers.algorithms.cases import Draw, Recorder

AbsentPackages("flash_attn", "deepspeed", "vllm").install()

from openrlhf.models.loss import DPOLoss, LogExpLoss, PairWiseLoss, PolicyLoss, SFTLoss, ValueLoss
from openrlhf.models.utils import compute_approx_kl, masked_normalize
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker
from openrlhf.trainer.ppo_utils.kl_controller import AdaptiveKLController
from openrlhf.trainer.ppo_utils.length_penalty import apply_overlong_penalty, apply_stop_properly_penalty

CORRECTIONS = (
    ("off", "mask", "ratio", (0.5, 5.0)),
    ("token", "mask", "ratio", (0.5, 5.0)),
    ("token", "clip", "ratio", (0.5, 2.0)),
    ("token", "mask", "ratio", (0.0, 2.0)),
    ("seq", "mask", "ratio", (0.8, 1.3)),
    ("token", "mask", "binary_kl", (0.0, 0.02)),
    ("seq", "mask", "binary_kl", (0.0, 0.02)),
    ("token", "mask", "tv", (0.0, 0.1)),
    ("seq", "mask", "tv", (0.0, 0.1)),
)
KINDS = (
    {"policy_loss_type": "ppo"},
    {"policy_loss_type": "ppo", "clip_eps_low": 0.1, "clip_eps_high": 0.28, "token_level_loss": False},
    {"policy_loss_type": "ppo", "dual_clip": 3.0},
    {"policy_loss_type": "gspo", "clip_eps_low": 0.003, "clip_eps_high": 0.004},
)


def policy_losses(to: Recorder) -> None:
    """PolicyLoss: PPO and GSPO, both aggregations, dual clip and every correction."""
    for kind, (level, mode, gating, threshold) in itertools.product(KINDS, CORRECTIONS):
        options = {
            **kind,
            "is_correction_level": level,
            "is_correction_mode": mode,
            "is_correction_gating": gating,
            "is_correction_threshold": list(threshold),
        }
        loss = PolicyLoss(**options)
        for number in range(8):
            _, batch = drawn_double(f"loss/policy {options}", number)

            def call(given, loss=loss):
                result = loss(
                    given["logprobs"],
                    given["old"],
                    given["advantages"],
                    given["mask"].double(),
                    given["behaviour"],
                )
                return {"loss": result[0]}

            inputs = batch.of("logprobs", "old", "behaviour", "advantages")
            if kind["policy_loss_type"] == "ppo":
                inputs["advantages"] = batch.token_advantages
            name = f"loss/policy {kind['policy_loss_type']}"
            to.record(name, options, inputs, call, differentiate=["logprobs"])


def other_losses(to: Recorder) -> None:
    """ValueLoss, SFTLoss, DPOLoss and the losses of reward models."""
    for number, clip, by_token in itertools.product(range(8), (None, 0.2, 0.5), (True, False)):
        draw, batch = drawn_double("loss/value", number)
        values = draw.normal(*batch.mask.shape)
        inputs = {
            "values": values,
            "old_values": draw.near(values - 3, 0.3) + 3,
            "returns": draw.normal(*batch.mask.shape),
            "mask": batch.mask,
        }
        value = ValueLoss(clip_eps=clip, token_level_loss=by_token)

        def fitted(given, value=value):
            mask = given["mask"].double()
            return {"loss": value(given["values"], given["old_values"], given["returns"], mask)}

        options = {"clip_eps": clip, "token_level_loss": by_token}
        to.record("loss/value", options, inputs, fitted, differentiate=["values"])
        sft = SFTLoss(token_level_loss=by_token)

        def imitated(given, sft=sft):
            return {"loss": sft(given["logprobs"], given["mask"].double())}

        to.record(
            "loss/sft",
            {"token_level_loss": by_token},
            batch.of("logprobs"),
            imitated,
            differentiate=["logprobs"],
        )
    for number, (beta, smoothing, ipo) in itertools.product(
        range(10), ((0.1, 0.0, False), (0.5, 0.1, False), (0.1, 0.0, True))
    ):
        draw = Draw("loss/dpo", number)
        names = ("chosen", "rejected", "chosen_reference", "rejected_reference")
        dpo = DPOLoss(beta, label_smoothing=smoothing, ipo=ipo)

        def preferred(given, dpo=dpo, names=names):
            return {"loss": dpo(*(given[name] for name in names))[0]}

        options = {"beta": beta, "label_smoothing": smoothing, "ipo": ipo}
        inputs = {name: -10 * draw.normal(5).abs() for name in names}
        to.record("loss/dpo", options, inputs, preferred, differentiate=["chosen", "rejected"])
    for number in range(20):
        draw = Draw("loss/reward", number)
        pair = {"chosen": draw.normal(6), "rejected": draw.normal(6)}

        def ranked(given):
            return {"loss": LogExpLoss()(given["chosen"], given["rejected"])}

        def ranked_by(given):
            return {"loss": PairWiseLoss()(given["chosen"], given["rejected"], given.get("margin"))}

        to.record("loss/log_exp", {}, pair, ranked, differentiate=list(pair))
        margin = {"margin": draw.normal(6).abs()} if number % 2 else {}
        to.record("loss/pair_wise", {}, {**pair, **margin}, ranked_by, differentiate=list(pair))


def divergences(to: Recorder) -> None:
    """compute_approx_kl, which casts to float32, masked_normalize and the controller."""
    for number, estimator, form in itertools.product(
        range(8), ("k1", "k2", "k3"), ("plain", "unbiased", "weighted")
    ):
        _, batch = drawn_single("kl/approx", number)
        inputs = batch.of("logprobs", "reference")
        if form == "weighted":
            inputs["old"] = batch.old

        def call(given, estimator=estimator, form=form):
            value = compute_approx_kl(
                given["logprobs"],
                given["reference"],
                given.get("old"),
                kl_estimator=estimator,
                unbiased_gradient=form != "plain",
            )
            return {"kl": value, "loss": (value * given["mask"]).sum()}

        options = {"kl_estimator": estimator, "unbiased_gradient": form != "plain"}
        to.record("kl/compute_approx_kl", options, inputs, call, differentiate=["logprobs"])
    for number in range(24):
        draw = Draw("kl/controller", number)
        inputs = {"current": 0.15 * abs(float(draw.normal(1))), "n_steps": 64 * draw.whole(1, 8)}

        def update(given):
            controller = AdaptiveKLController(0.02, 0.1, 10000)
            controller.update(given["current"], given["n_steps"])
            return {"coefficient": float(controller.value)}

        options = {"init_kl_coef": 0.02, "target": 0.1, "horizon": 10000}
        to.record("kl/adaptive_controller", options, inputs, update)
    for number in range(24):
        draw, batch = drawn_double("advantage/masked_normalize", number)

        def whiten(given):
            flat, chosen = given["values"].reshape(1, -1), given["mask"].double().reshape(1, -1)
            return {"normalised": masked_normalize(flat, chosen).reshape(given["values"].shape)}

        inputs = {"values": draw.normal(*batch.mask.shape), "mask": batch.mask}
        to.record("advantage/masked_normalize", {}, inputs, whiten)


ESTIMATORS = (
    ("gae", 1.0, 1.0),
    ("gae", 0.99, 0.95),
    ("reinforce", 1.0, 1.0),
    ("reinforce", 0.99, 1.0),
    ("rloo", 1.0, 1.0),
    ("reinforce_baseline", 1.0, 1.0),
    ("group_norm", 1.0, 1.0),
    ("dr_grpo", 1.0, 1.0),
    ("flash_reinforce", 1.0, 1.0),
)


def advantages(to: Recorder) -> None:
    """RemoteExperienceMaker.compute_advantages_and_returns: all estimators, KL in the reward, clipped rewards."""
    for (name, gamma, trace), kl, clip in itertools.product(ESTIMATORS, (0.0, 0.1), (None, (-0.5, 0.5))):
        for number in range(6):
            draw, batch = drawn_single(f"advantage/{name} {gamma} {kl} {clip}", number, size=4, empty=0.0)
            no_std = number % 3 == 1
            advantage = SimpleNamespace(estimator=name, gamma=gamma, lambd=trace, no_std_norm=no_std)
            maker = RemoteExperienceMaker.__new__(RemoteExperienceMaker)
            maker.strategy = SimpleNamespace(
                args=SimpleNamespace(
                    algo=SimpleNamespace(advantage=advantage),
                    rollout=SimpleNamespace(n_samples_per_prompt=4),
                    reward=SimpleNamespace(clip_range=clip),
                )
            )
            maker.advantage_estimator, maker.kl_ctl = name, SimpleNamespace(value=kl)

            def call(given, maker=maker):
                experience = SimpleNamespace(
                    rewards=given["scores"],
                    index=list(range(len(given["scores"]))),
                    info={},
                    kl=given["logprobs"] - given["reference"],
                    action_mask=given["mask"],
                    values=given["values"],
                )
                made = maker.compute_advantages_and_returns([experience])[0]
                return {"advantages": made.advantages, "returns": made.returns}

            options = {
                "estimator": name,
                "gamma": gamma,
                "lambd": trace,
                "no_std_norm": no_std,
                "kl_coef": kl,
                "clip_range": clip,
            }
            inputs = batch.of("scores", "groups", "logprobs", "reference")
            inputs["values"] = draw.normal(*batch.mask.shape)
            to.record(f"advantage/{name}", options, inputs, call)


def penalties(to: Recorder) -> None:
    """Length penalties of length_penalty.py."""
    for number, factor in itertools.product(range(10), (1.0, 0.5, 2.0)):
        draw = Draw("reward/penalty", number)
        lengths = torch.randint(1, 140, (8,), generator=draw.generator)
        inputs = {"rewards": draw.normal(8), "lengths": lengths}

        def overlong(given, factor=factor):
            experience = SimpleNamespace(rewards=given["rewards"], response_length=given["lengths"])
            apply_overlong_penalty([experience], 120, 32, factor)
            return {"rewards": experience.rewards}

        options = {"max_new_tokens": 120, "overlong_buffer_len": 32, "overlong_penalty_factor": factor}
        to.record("reward/overlong_penalty", options, inputs, overlong)
        coefficient = (0.0, 0.5, 1.0, -0.5)[number % 4]
        inputs = {"rewards": draw.normal(8), "truncated": draw.normal(8) < -0.3}

        def stopped(given, coefficient=coefficient):
            experience = SimpleNamespace(rewards=given["rewards"], truncated=given["truncated"])
            apply_stop_properly_penalty([experience], coefficient)
            return {"rewards": experience.rewards}

        options = {"stop_properly_penalty_coef": coefficient}
        to.record("reward/stop_properly_penalty", options, inputs, stopped)


if __name__ == "__main__":
    recorder_of("openrlhf", __doc__, (policy_losses, other_losses, divergences, advantages, penalties))
