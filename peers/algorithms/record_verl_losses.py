"""verl's losses, their aggregation, and its corrections: part of `record_verl.py`."""

from typing import Any

from torch import Tensor
from verl.trainer.ppo import core_algos, rollout_corr_helper
from verl.workers.config import ActorConfig, PolicyLossConfig

from peers.algorithms.cases import Recorder
from peers.algorithms.drawn import clips, drawn, mismatched, updates

MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")


def aggregation(recorder: Recorder) -> None:
    """One number of token losses."""
    for mode in MODES:
        for draw in drawn(mode, 20):
            mask = draw.mask(draw.whole(1, 8), draw.whole(4, 12))
            options = {"loss_agg_mode": mode}
            if mode == "seq-mean-token-sum-norm":
                options["loss_scale_factor"] = draw.choice((None, 100))
            if draw.chance(0.5):
                # A micro-batch of a larger batch, whose ranks' gradients are averaged.
                options |= {"dp_size": draw.whole(1, 4), "batch_num_tokens": 500, "global_batch_size": 64}
            recorder.record(
                f"agg_loss/{mode}",
                options,
                {"mask": mask, "values": draw.normal(*mask.shape)},
                lambda given, options=options: {
                    "loss": core_algos.agg_loss(given["values"], given["mask"].double(), **options)
                },
                differentiate=("values",),
            )


def actor_config(options: dict[str, Any]) -> ActorConfig:
    """Return verl's configuration of an actor with these options."""
    names = (
        "clip_ratio",
        "clip_ratio_low",
        "clip_ratio_high",
        "clip_ratio_c",
        "tau_pos",
        "tau_neg",
        "loss_scale_factor",
    )
    own = {name: options[name] for name in names if name in options}
    policy = options.get("policy_loss", {})
    return ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        use_dynamic_bsz=True,
        policy_loss=PolicyLossConfig(**policy),
        global_batch_info={
            "dp_size": 1,
            "batch_num_tokens": options.get("batch_num_tokens"),
            "global_batch_size": options.get("global_batch_size"),
            "loss_scale_factor": options.get("loss_scale_factor"),
        },
        **own,
    )


def losses(recorder: Recorder) -> None:
    """Policy losses by their registered names, and the critic's."""
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
    ):
        for draw in drawn(name, 40):
            options = {"loss_agg_mode": draw.choice(MODES[:3] + MODES[4:]), **clips(draw)}
            if name == "gspo":
                options |= draw.choice(({}, {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}))
            if name == "sapo":
                options |= {"tau_pos": draw.choice((1.0, 0.5)), "tau_neg": draw.choice((1.05, 2.0))}
            if name == "dro":
                options["policy_loss"] = {"dro_beta": draw.choice((0.1, 1.0))}
            if name == "kl_cov":
                options["policy_loss"] = {
                    "kl_cov_ratio": draw.choice((2e-4, 0.1, 0.5)),
                    "ppo_kl_coef": draw.choice((1.0, 0.2)),
                }
            if name == "clip_cov":
                # So many that all candidates are dropped: nothing is left to the draw.
                options["policy_loss"] = {
                    "clip_cov_ratio": 1.0,
                    "clip_cov_lb": draw.choice((1.0, 0.1)),
                    "clip_cov_ub": 5.0,
                }
            if draw.chance(0.3):
                options |= {"batch_num_tokens": 300, "global_batch_size": 32}
            batch = updates(draw)
            if name.endswith("_cov"):
                # Equal advantages have no covariance: which tokens have the most of it would be rounding.
                batch["advantages"] = draw.normal(*batch["mask"].shape)
            recorder.record(
                f"loss/{name}",
                options,
                batch,
                lambda given, name=name, options=options: policy(given, name, options),
                differentiate=("logprobs",),
            )
    for draw in drawn("value", 40):
        mask = draw.mask(draw.whole(2, 8), draw.whole(4, 14))
        old = draw.normal(*mask.shape)
        batch = {
            "mask": mask,
            "old_values": old,
            "values": old + draw.normal(*mask.shape),
            "returns": draw.normal(*mask.shape),
        }
        options = {
            "cliprange_value": draw.choice((0.5, 0.1, 10.0)),
            "loss_agg_mode": draw.choice(MODES[:3] + MODES[4:]),
        }
        recorder.record(
            "loss/value",
            options,
            batch,
            lambda given, options=options: value(given, options),
            differentiate=("values",),
        )


def policy(given: dict[str, Any], name: str, options: dict[str, Any], **further: Any) -> dict[str, Tensor]:
    """One of verl's policy losses."""
    loss, _ = core_algos.get_policy_loss_fn(name)(
        old_log_prob=given["old"],
        log_prob=given["logprobs"],
        advantages=given["advantages"],
        response_mask=given["mask"].to(given["logprobs"].dtype),
        loss_agg_mode=options["loss_agg_mode"],
        config=actor_config(options),
        **further,
    )
    return {"loss": loss}


def value(given: dict[str, Any], options: dict[str, Any]) -> dict[str, Tensor]:
    """The critic's loss."""
    loss, _ = core_algos.compute_value_loss(
        given["values"], given["returns"], given["old_values"], given["mask"].double(), **options
    )
    return {"loss": loss}


REJECTIONS = (
    ("token_k1", ("0.5_2.0", "1.2", "0.9_1.1")),
    ("token_k2", ("0.02", "0.5")),
    ("token_k3", ("0.02", "0.5")),
    ("seq_sum_k1", ("0.5_2.0", "0.9_1.1")),
    ("seq_sum_k2", ("0.1", "1.0")),
    ("seq_sum_k3", ("0.1", "1.0")),
    ("seq_mean_k1", ("0.99_1.01", "0.9_1.1", "1.05")),
    ("seq_mean_k2", ("0.01", "0.2")),
    ("seq_mean_k3", ("0.01", "0.2")),
    ("seq_max_k2", ("0.05", "0.5")),
    ("seq_max_k3", ("0.05", "0.5")),
)


def corrections(recorder: Recorder) -> None:
    """Weights and rejection of the mismatch, alone and in a loss."""
    for level in ("token", "sequence"):
        for draw in drawn(f"weights {level}", 40):
            options = {
                "rollout_is": level,
                "rollout_is_threshold": draw.choice((2.0, 1.1, "0.5_5.0", "0.8_1.25")),
                "rollout_is_batch_normalize": draw.chance(0.4),
            }
            recorder.record(
                f"rollout_is/{level}",
                options,
                mismatched(draw),
                lambda given, options=options: weights(given, options),
            )
    for name, thresholds in REJECTIONS:
        for draw in drawn(f"reject {name}", 20):
            options = {"rollout_rs": name, "rollout_rs_threshold": draw.choice(thresholds)}
            recorder.record(
                f"rollout_rs/{name}",
                options,
                mismatched(draw),
                lambda given, options=options: rejection(given, options),
            )
    for draw in drawn("reject several", 20):
        options = {"rollout_rs": "token_k1,seq_max_k3", "rollout_rs_threshold": "0.5_2.0,0.5"}
        recorder.record(
            "rollout_rs/several",
            options,
            mismatched(draw),
            lambda given, options=options: rejection(given, options),
        )
    for draw in drawn("off-policy metrics"):
        recorder.record("offpolicy_metrics", {}, mismatched(draw), distances)
    for draw in drawn("corrected", 40):
        options = {
            "loss_agg_mode": draw.choice(MODES[:3] + MODES[4:]),
            **clips(draw),
            "rollout_is": draw.choice(("token", "sequence", None)),
            "rollout_is_threshold": draw.choice((2.0, 1.1, "0.5_5.0")),
            "rollout_is_batch_normalize": draw.chance(0.3),
            "counted": draw.choice(("kept", "all")),
        }
        if draw.chance(0.6):
            name, thresholds = draw.choice(REJECTIONS)
            options |= {"rollout_rs": name, "rollout_rs_threshold": draw.choice(thresholds)}
        batch = updates(draw)
        batch["behaviour"] = draw.near(batch["old"])
        if options["counted"] == "all":
            options |= counts(batch["mask"])
        recorder.record(
            "loss/vanilla corrected",
            options,
            batch,
            lambda given, options=options: corrected(given, options),
            differentiate=("logprobs",),
        )
    for draw in drawn("bypass", 40):
        options = {
            "loss_agg_mode": draw.choice(MODES[:3] + MODES[4:]),
            **clips(draw),
            "loss_type": draw.choice(("ppo_clip", "reinforce")),
            "rollout_is": draw.choice(("token", "sequence", None)),
            "rollout_is_threshold": draw.choice((2.0, 1.1)),
        }
        if draw.chance(0.5):
            name, thresholds = draw.choice(REJECTIONS)
            options |= {"rollout_rs": name, "rollout_rs_threshold": draw.choice(thresholds)}
        batch = updates(draw)
        options |= counts(batch["mask"])
        recorder.record(
            "loss/bypass_mode",
            options,
            batch,
            lambda given, options=options: bypass(given, options),
            differentiate=("logprobs",),
        )


def counts(mask: Tensor) -> dict[str, int]:
    """Return the counts that verl's engine passes on: those of the mask before anything is rejected."""
    return {"batch_num_tokens": int(mask.sum()), "global_batch_size": int(mask.any(dim=1).sum())}


def distances(given: dict[str, Any]) -> dict[str, float]:
    """Estimates of how far apart the two policies are."""
    found = rollout_corr_helper.compute_offpolicy_metrics(
        given["old"], given["behaviour"], given["mask"].double()
    )
    return {"kl": found["kl"], "k3": found["k3_kl"]}


def weights(given: dict[str, Any], options: dict[str, Any]) -> dict[str, Tensor]:
    """Importance weights."""
    found, _ = rollout_corr_helper.compute_rollout_correction_weights(
        given["old"] - given["behaviour"], given["mask"].double(), **options
    )
    return {"weights": found}


def rejection(given: dict[str, Any], options: dict[str, Any]) -> dict[str, Tensor]:
    """Which tokens are kept."""
    mask, _ = rollout_corr_helper.compute_rollout_rejection_mask(
        given["old"] - given["behaviour"], given["mask"].double(), **options
    )
    return {"kept": mask}


def corrected(given: dict[str, Any], options: dict[str, Any]) -> dict[str, Tensor]:
    """PPO's loss with weights and rejection, composed as in verl's trainer."""
    names = (
        "rollout_is",
        "rollout_is_threshold",
        "rollout_is_batch_normalize",
        "rollout_rs",
        "rollout_rs_threshold",
    )
    found, mask, _ = rollout_corr_helper.compute_rollout_correction_and_rejection_mask(
        given["old"],
        given["behaviour"],
        given["mask"].double(),
        **{name: options.get(name) for name in names},
    )
    kept = {**given, "mask": mask}
    return policy(
        kept, "vanilla", options, rollout_is_weights=found.batch["rollout_is_weights"] if found else None
    )


def bypass(given: dict[str, Any], options: dict[str, Any]) -> dict[str, Tensor]:
    """The loss of bypass mode: the policy that sampled is the one that ratios start from."""
    names = ("loss_type", "rollout_is", "rollout_is_threshold", "rollout_rs", "rollout_rs_threshold")
    chosen = {name: options[name] for name in names if name in options}
    return policy(given, "bypass_mode", {**options, "policy_loss": {"rollout_correction": chosen}})
