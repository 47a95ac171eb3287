"""Record SkyRL's functions, in an interpreter that has skyrl (0.3.0) and its skyrl-gym:

    PYTHONPATH=. PYTHON -m peers.algorithms.record_skyrl --out CASES

Ratios are float32 whatever they are made of, so all of it is recorded in float32.
"""

import argparse
import typing
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import typing_extensions
from torch import Tensor

from peers.algorithms.cases import Draw, Recorder
from peers.algorithms.drawn import episodes, mismatched, updates

# Its types are those of Python 3.12, which pydantic asks for.
typing.TypedDict = typing_extensions.TypedDict  # type: ignore[assignment]

from skyrl.backends.skyrl_train.utils import off_policy_correction_utils as off_policy
from skyrl.backends.skyrl_train.utils import ppo_utils
from skyrl.train.config import AlgorithmConfig
from skyrl.train.generators.utils import apply_overlong_filtering
from skyrl.train.utils.trainer_utils import zero_variance_filter

LOSSES = {
    "regular": ppo_utils.ppo_policy_loss,
    "dual_clip": ppo_utils.ppo_policy_loss,
    "sapo": ppo_utils.sapo_policy_loss,
    "gspo": ppo_utils.gspo_policy_loss,
    "cispo": ppo_utils.compute_policy_loss_cispo,
    "rollout_is": ppo_utils.rollout_is_policy_loss,
    "dppo": ppo_utils.dppo_policy_loss,
    "clip_cov": ppo_utils.compute_policy_loss_clip_cov,
    "kl_cov": ppo_utils.compute_policy_loss_kl_cov,
    "cross_entropy": ppo_utils.cross_entropy_loss,
    "importance_sampling": ppo_utils.importance_sampling_loss,
}
REDUCTIONS = ("token_mean", "token_mean_legacy", "sequence_mean", "seq_mean_token_sum_norm", "prompt_mean")
CORRECTIONS: tuple[dict[str, Any], ...] = (
    {"tis_ratio_type": "token", "token_tis_ratio_clip_high": 2.0},
    {"tis_ratio_type": "token", "token_tis_ratio_clip_high": 1.1},
    {"tis_ratio_type": "sequence", "sequence_tis_ratio_clip_high": 5.0},
    {"sequence_mask_metric": "geometric", "geo_mask_low": 0.97, "geo_mask_high": 1.03},
    {"sequence_mask_metric": "product", "product_mask_low": 0.5, "product_mask_high": 2.0},
    {"outlier_token_is_threshold_low": 0.5, "outlier_token_is_threshold_high": 2.0},
    {"outlier_token_is_threshold_high": 1.5},
    {"token_mask_is_threshold_low": 0.8, "token_mask_is_threshold_high": 1.25},
    {"token_mask_is_threshold_low": 0.8, "token_mask_is_threshold_high": 1.25, "tis_ratio_type": "token"},
    {"token_mask_is_threshold_low": 0.8, "token_mask_is_threshold_high": 1.25, "tis_ratio_type": "sequence"},
    {"outlier_token_is_threshold_low": 0.2, "tis_ratio_type": "token", "sequence_mask_metric": "product"},
)


def main() -> None:
    """Record all of it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    recorder = Recorder("skyrl", version("skyrl"), parser.parse_args().out)
    for part in (advantages, reductions, losses, corrections, critics, penalties, filters):
        part(recorder)
    recorder.close()


def draws(function: str, cases: int = 30) -> list[Draw]:
    """Return the draws of a function's cases."""
    return [Draw(f"skyrl {function}", number, torch.float32) for number in range(cases)]


def advantages(recorder: Recorder) -> None:
    """Advantages by their registered names."""
    names = {
        "grpo": ppo_utils.compute_grpo_outcome_advantage,
        "rloo": ppo_utils.compute_rloo_outcome_advantage,
        "maxrl": ppo_utils.compute_maxrl_advantage,
        "reinforce++": ppo_utils.compute_reinforce_plus_plus_outcome_advantage,
        "gae": ppo_utils.compute_gae_advantage_return,
    }
    for name, function in names.items():
        for draw in draws(name):
            batch = episodes(draw, turns=name in ("gae", "reinforce++"))
            options: dict[str, Any] = {}
            if name == "grpo":
                options = {"grpo_norm_by_std": draw.chance(0.7), "epsilon": draw.choice((1e-6, 1e-4))}
            if name in ("gae", "reinforce++"):
                options["gamma"] = draw.choice((1.0, 0.99, 0.9))
            if name == "gae":
                options["lambd"] = draw.choice((1.0, 0.95, 0.5))
                batch["values"] = draw.normal(*batch["mask"].shape)

            def call(given: dict[str, Any], function: Any = function, options: Any = options) -> Any:
                found, returns = function(
                    token_level_rewards=given["rewards"],
                    response_mask=given["mask"].float(),
                    index=np.array([f"prompt {each}" for each in given["groups"]]),
                    values=given.get("values"),
                    **options,
                )
                return (
                    {"advantages": found, "returns": returns} if "gamma" in options else {"advantages": found}
                )

            recorder.record(f"advantage/{name}", options, batch, call)


def configured(options: dict[str, Any]) -> AlgorithmConfig:
    """Return SkyRL's configuration with these options."""
    config = AlgorithmConfig(policy_loss_type=options.get("policy_loss_type", "regular"))
    for name in ("eps_clip_low", "eps_clip_high", "clip_ratio_c", "value_clip"):
        if name in options:
            setattr(config, name, options[name])
    for part in ("sapo", "cispo", "dppo", "clip_cov", "kl_cov", "off_policy_correction"):
        for name, value in options.get(part, {}).items():
            setattr(getattr(config, part), name, value)
    return config


def reductions(recorder: Recorder) -> None:
    """The loss's reduction, which scales the advantages that a sum is then taken of."""
    for reduction in REDUCTIONS:
        for draw in draws(reduction, 20):
            batch = updates(draw)
            rows = len(batch["mask"])
            options: dict[str, Any] = {
                "loss_reduction": reduction,
                "micro_batch_size": rows,
                "max_seq_len": 50,
            }
            if reduction == "token_mean_legacy":
                options["micro_batch_size"] = draw.choice(
                    [size for size in range(1, rows + 1) if rows % size == 0]
                )
            if reduction == "prompt_mean":
                first = draw.whole(1, rows - 1)
                options["prompt_boundaries"] = [[0, first], [first, rows]]
            recorder.record(
                f"reduction/{reduction}",
                options,
                batch,
                lambda given, options=options: reduced(given, options),
                differentiate=("logprobs",),
            )


def reduced(given: dict[str, Any], options: dict[str, Any]) -> dict[str, Tensor]:
    """PPO's loss, reduced as SkyRL's trainer does."""
    scaled = ppo_utils.apply_loss_reduction_to_advantages_minibatch(
        given["advantages"], given["mask"].float(), **options
    )
    return policy({**given, "advantages": scaled}, {"policy_loss_type": "regular"})


def losses(recorder: Recorder) -> None:
    """Policy losses by their registered names: sums over tokens."""
    for name in LOSSES:
        for draw in draws(name):
            batch = updates(draw)
            low, high = draw.choice(((0.2, 0.2), (0.2, 0.28), (0.1, 0.5)))
            options: dict[str, Any] = {"policy_loss_type": name, "eps_clip_low": low, "eps_clip_high": high}
            if name == "dual_clip":
                options["clip_ratio_c"] = draw.choice((3.0, 1.5))
            if name == "sapo":
                options["sapo"] = draw.choice(
                    ({"tau_pos": 1.0, "tau_neg": 1.05}, {"tau_pos": 0.5, "tau_neg": 2.0})
                )
            if name == "cispo":
                options["cispo"] = draw.choice(
                    (
                        {"cispo_eps_clip_low": 0.0, "cispo_eps_clip_high": 5.0},
                        {"cispo_eps_clip_low": 1.0, "cispo_eps_clip_high": 0.28},
                    )
                )
            if name == "dppo":
                kind = draw.choice(("binary_tv", "binary_kl"))
                bound = 0.2 if kind == "binary_tv" else 0.05
                options["dppo"] = {
                    "dppo_type": kind,
                    "delta_low": bound,
                    "delta_high": draw.choice((bound, 0.1)),
                }
            if name == "clip_cov":
                options["clip_cov"] = {
                    "clip_ratio": 1.0,
                    "clip_cov_lb": draw.choice((1.0, 0.1)),
                    "clip_cov_ub": 5.0,
                }
            if name == "kl_cov":
                options["kl_cov"] = {
                    "kl_cov_frac": draw.choice((0.2, 0.002)),
                    "ppo_kl_coef": draw.choice((1.0, 0.2)),
                }
            if name.endswith("_cov"):
                batch["advantages"] = draw.normal(*batch["mask"].shape)
            if name in ("rollout_is", "dppo"):
                batch["behaviour"] = draw.near(batch["old"], 0.1)
            recorder.record(
                f"loss/{name}",
                options,
                batch,
                lambda given, options=options: policy(given, options),
                differentiate=("logprobs",),
            )


def policy(given: dict[str, Any], options: dict[str, Any]) -> dict[str, Tensor]:
    """One of SkyRL's policy losses."""
    loss, _ = LOSSES[options["policy_loss_type"]](
        given["logprobs"],
        given["old"],
        given["advantages"],
        configured(options),
        loss_mask=given["mask"].float(),
        rollout_logprobs=given.get("behaviour"),
    )
    return {"loss": loss}


def corrections(recorder: Recorder) -> None:
    """Off-policy corrections, in a loss and alone."""
    for name in ("regular", "gspo", "cispo", "sapo"):
        for draw in draws(f"{name} corrected"):
            batch = updates(draw)
            batch["behaviour"] = draw.near(batch["old"], draw.choice((0.02, 0.2)))
            options = {"policy_loss_type": name, "off_policy_correction": draw.choice(CORRECTIONS)}
            recorder.record(
                f"loss/{name} corrected",
                options,
                batch,
                lambda given, options=options: policy(given, options),
                differentiate=("logprobs",),
            )
    for draw in draws("off_policy_correction", 40):
        options = {"off_policy_correction": draw.choice(CORRECTIONS)}
        recorder.record(
            "off_policy_correction",
            options,
            mismatched(draw),
            lambda given, options=options: corrected(given, options),
        )


def corrected(given: dict[str, Any], options: dict[str, Any]) -> dict[str, Tensor]:
    """What a loss of 1 on every token becomes."""
    ones = torch.ones_like(given["old"])
    loss, mask, _ = off_policy.apply_off_policy_correction(
        ones,
        given["old"],
        given["behaviour"],
        given["mask"].float(),
        configured(options).off_policy_correction,
    )
    return {"weights": loss * mask}


def critics(recorder: Recorder) -> None:
    """The critic's loss."""
    for draw in draws("critic"):
        mask = draw.mask(draw.whole(2, 8), draw.whole(4, 14))
        old = draw.normal(*mask.shape)
        batch = {
            "mask": mask,
            "old_values": old,
            "values": old + draw.normal(*mask.shape),
            "returns": draw.normal(*mask.shape),
        }
        options = {"value_clip": draw.choice((0.2, 1.0, None))}
        recorder.record(
            "loss/critic",
            options,
            batch,
            lambda given, options=options: {
                "loss": ppo_utils.ppo_critic_loss(
                    given["values"],
                    given["old_values"],
                    given["returns"],
                    configured(options),
                    given["mask"].float(),
                )[0]
            },
            differentiate=("values",),
        )


def penalties(recorder: Recorder) -> None:
    """Estimates of the divergence, and the controller of its weight."""
    for name in ("k1", "abs", "k2", "k3"):
        for draw in draws(f"kl {name}", 20):
            mask = draw.mask(4, 10)
            reference = draw.logprobs(4, 10)
            recorder.record(
                "compute_approx_kl/" + name,
                {"kl_estimator_type": name},
                {
                    "mask": mask,
                    "logprobs": draw.near(reference, draw.choice((0.1, 1.0, 5.0))),
                    "reference": reference,
                },
                lambda given, name=name: {
                    "kl": ppo_utils.compute_approx_kl(
                        given["logprobs"], given["reference"], given["mask"].float(), kl_estimator_type=name
                    )
                },
                differentiate=("logprobs",),
                gradient_of="kl",
            )
    for draw in draws("adaptive_kl", 20):
        options = {
            "init_kl_coef": draw.choice((0.001, 0.1)),
            "target_kl": draw.choice((0.1, 0.01)),
            "horizon": draw.choice((10000, 500)),
            "n_steps": draw.whole(1, 512),
        }
        recorder.record(
            "AdaptiveKLController",
            options,
            {"kl": float(draw.normal(1).abs()[0]) * 0.1},
            lambda given, options=options: adaptive(given, options),
        )


def adaptive(given: dict[str, Any], options: dict[str, Any]) -> dict[str, float]:
    """The coefficient after an update."""
    controller = ppo_utils.AdaptiveKLController(
        options["init_kl_coef"], options["target_kl"], options["horizon"]
    )
    controller.update(given["kl"], options["n_steps"])
    return {"coefficient": float(controller.value)}


def filters(recorder: Recorder) -> None:
    """Groups without a difference, and episodes that were cut off."""
    for draw in draws("zero_variance_filter"):
        groups = draw.groups(draw.whole(4, 16))
        scores = draw.scores(groups)
        batch = {"groups": groups, "scores": (scores + 1e-7 * draw.normal(len(groups))).double()}
        options = {"tol": 1e-6}
        if draw.chance(0.5):
            batch["scores"], options = scores.double(), {"tol": 0.0}
        recorder.record(
            "zero_variance_filter",
            options,
            batch,
            lambda given, options=options: {
                "kept": zero_variance_filter(
                    given["scores"].tolist(), [str(each) for each in given["groups"]], **options
                )
            },
        )
    for draw in draws("overlong"):
        mask = draw.mask(draw.whole(2, 8), 10)
        cut = [draw.chance(0.4) for _ in mask]
        recorder.record(
            "apply_overlong_filtering",
            {},
            {"rows": mask, "truncated": cut},
            lambda given: {
                "kept": apply_overlong_filtering(
                    given["rows"].long().tolist(),
                    ["length" if each else "stop" for each in given["truncated"]],
                )
            },
        )


if __name__ == "__main__":
    main()
