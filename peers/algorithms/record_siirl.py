"""Record siiRL's functions, in an interpreter that has siirl (0.2.0):

PYTHONPATH=. PYTHON -m peers.algorithms.record_siirl --out CASES
"""

import argparse
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from siirl.dag_worker import core_algos
from siirl.params.model_args import ActorArguments
from torch import Tensor

from peers.algorithms.cases import Draw, Recorder
from peers.algorithms.drawn import clips, drawn, episodes, updates

MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")
OWN_CONFIGURATION = ("clip_cov", "kl_cov", "geo_mean")


def main() -> None:
    """Record all of it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    recorder = Recorder("siirl", version("siirl"), parser.parse_args().out)
    for part in (advantages, aggregation, losses, penalties):
        part(recorder)
    recorder.close()


def advantages(recorder: Recorder) -> None:
    """Advantages of episodes and of tokens."""
    for draw in drawn("siirl grpo"):
        options: dict[str, Any] = {"norm_adv_by_std_in_grpo": draw.chance(0.7)}
        recorder.record(
            "advantage/grpo", options, episodes(draw), lambda given, options=options: grpo(given, options)
        )
    for draw in drawn("siirl cpgd"):
        options = {"weight_factor_in_cpgd": draw.choice(("STD_weight", "clip_filter_like_weight", "naive"))}
        recorder.record(
            "advantage/cpgd", options, episodes(draw), lambda given, options=options: cpgd(given, options)
        )
    for draw in drawn("siirl gae", 40):
        batch = episodes(draw, turns=True)
        batch["values"] = draw.normal(*batch["mask"].shape)
        options = {"gamma": draw.choice((1.0, 0.99, 0.9)), "lam": draw.choice((1.0, 0.95, 0.5))}
        recorder.record("advantage/gae", options, batch, lambda given, options=options: gae(given, options))


def grpo(given: dict[str, Any], options: dict[str, Any]) -> dict[str, Tensor]:
    """Advantages in groups."""
    found, _ = core_algos.compute_grpo_outcome_advantage(
        given["rewards"], given["mask"].double(), np.array(given["groups"]), **options
    )
    return {"advantages": found}


def cpgd(given: dict[str, Any], options: dict[str, Any]) -> dict[str, Tensor]:
    """CPGD's forms of them."""
    found, _ = core_algos.compute_cpgd_outcome_advantage(
        given["rewards"], given["mask"].double(), np.array(given["groups"]), **options
    )
    return {"advantages": found}


def gae(given: dict[str, Any], options: dict[str, Any]) -> dict[str, Tensor]:
    """Advantages from a critic."""
    found, returns = core_algos.compute_gae_advantage_return(
        given["rewards"], given["values"], given["mask"].double(), **options
    )
    return {"advantages": found, "returns": returns}


def aggregation(recorder: Recorder) -> None:
    """One number of token losses."""
    for mode in MODES:
        for draw in drawn(f"siirl {mode}", 20):
            mask = draw.mask(draw.whole(1, 8), draw.whole(4, 12))
            recorder.record(
                f"agg_loss/{mode}",
                {"loss_agg_mode": mode},
                {"mask": mask, "values": draw.normal(*mask.shape)},
                lambda given, mode=mode: {
                    "loss": core_algos.agg_loss(given["values"], given["mask"].double(), mode)
                },
                differentiate=("values",),
            )


def losses(recorder: Recorder) -> None:
    """Policy losses by their registered names, and the critic's."""
    for name in ("vanilla", "cpgd", "gspo", "gpg", "geo_mean", "kl_cov", "clip_cov"):
        for draw in drawn(f"siirl {name}", 40):
            options = {"loss_agg_mode": draw.choice(MODES[:2] + MODES[3:]), **clips(draw)}
            batch = updates(draw, empty=0.03)
            if name == "kl_cov":
                options["policy_loss"] = {
                    "kl_cov_ratio": draw.choice((2e-4, 0.1, 0.5)),
                    "ppo_kl_coef": draw.choice((1.0, 0.2)),
                }
            if name == "clip_cov":
                options["policy_loss"] = {
                    "clip_cov_ratio": 1.0,
                    "clip_cov_lb": draw.choice((1.0, 0.1)),
                    "clip_cov_ub": 5.0,
                }
            if name.endswith("_cov"):
                batch["advantages"] = draw.normal(*batch["mask"].shape)
            recorder.record(
                f"loss/{name}",
                options,
                batch,
                lambda given, name=name, options=options: policy(given, name, options),
                differentiate=("logprobs",),
            )
    for draw in drawn("siirl value", 30):
        mask = draw.mask(draw.whole(2, 8), draw.whole(4, 14), empty=0.03)
        old = draw.normal(*mask.shape)
        batch = {
            "mask": mask,
            "old_values": old,
            "values": old + draw.normal(*mask.shape),
            "returns": draw.normal(*mask.shape),
        }
        options = {
            "cliprange_value": draw.choice((0.5, 0.1, 10.0)),
            "loss_agg_mode": draw.choice(MODES[:2] + MODES[3:]),
        }
        recorder.record(
            "loss/value",
            options,
            batch,
            lambda given, options=options: value(given, options),
            differentiate=("values",),
        )


def policy(given: dict[str, Any], name: str, options: dict[str, Any]) -> dict[str, Tensor]:
    """One of siiRL's policy losses."""
    own = {key: options[key] for key in options if key.startswith("clip_")}
    config: Any = ActorArguments(**own)
    if name in OWN_CONFIGURATION:
        # These refuse the configuration that the trainer passes.
        parts = SimpleNamespace(**options.get("policy_loss", {}))
        config = SimpleNamespace(
            **{"clip_ratio_low": None, "clip_ratio_high": None, **own}, policy_loss=parts
        )
    found = core_algos.get_policy_loss_fn(name)(
        given["old"],
        given["logprobs"],
        given["advantages"],
        given["mask"].double(),
        loss_agg_mode=options["loss_agg_mode"],
        config=config,
    )
    return {"loss": found[0]}


def value(given: dict[str, Any], options: dict[str, Any]) -> dict[str, Tensor]:
    """The critic's loss."""
    found, _ = core_algos.compute_value_loss(
        given["values"], given["returns"], given["old_values"], given["mask"].double(), **options
    )
    return {"loss": found}


def penalties(recorder: Recorder) -> None:
    """Estimates of the divergence, and the controller of its weight."""
    for name in ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"):
        for draw in drawn(f"siirl {name}", 20):
            mask = draw.mask(4, 10)
            reference = draw.logprobs(4, 10)
            recorder.record(
                "kl_penalty/" + name,
                {"kl_penalty": name},
                {
                    "mask": mask,
                    "logprobs": draw.near(reference, draw.choice((0.1, 1.0, 5.0))),
                    "reference": reference,
                },
                lambda given, name=name: {
                    "kl": core_algos.kl_penalty(given["logprobs"], given["reference"], name)
                },
                differentiate=("logprobs",),
                gradient_of="kl",
                everywhere=("kl",),
            )
    for draw in drawn("siirl compute_rewards", 20):
        batch = episodes(draw, turns=True)
        batch["old"] = draw.logprobs(*batch["mask"].shape)
        batch["reference"] = draw.near(batch["old"])
        options = {"kl_ratio": draw.choice((0.001, 0.1))}
        recorder.record(
            "compute_rewards",
            options,
            batch,
            lambda given, options=options: {
                "rewards": core_algos.compute_rewards(
                    given["rewards"], given["old"], given["reference"], **options
                )
            },
        )
    for draw in drawn("siirl adaptive_kl", 20):
        recorder.record("AdaptiveKLController", *controlled(draw))


def controlled(draw: Draw) -> Any:
    """Return a controller's options, what it measures and its answer."""
    options = {
        "init_kl_coef": draw.choice((0.001, 0.1)),
        "target_kl": draw.choice((0.1, 0.01)),
        "horizon": draw.choice((10000, 500)),
        "n_steps": draw.whole(1, 512),
    }

    def call(given: dict[str, Any]) -> dict[str, float]:
        controller = core_algos.AdaptiveKLController(
            options["init_kl_coef"], options["target_kl"], options["horizon"]
        )
        controller.update(given["kl"], options["n_steps"])
        return {"coefficient": float(controller.value)}

    return options, {"kl": float(draw.normal(1).abs()[0]) * 0.1}, call


if __name__ == "__main__":
    main()
