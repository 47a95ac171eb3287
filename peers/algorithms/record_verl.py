"""Record verl's functions, in an interpreter that has verl (0.9.1):

PYTHONPATH=. PYTHON -m peers.algorithms.record_verl --out CASES
"""

import argparse
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from verl.protocol import DataProto
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos, ray_trainer
from verl.utils import torch_functional

from peers.algorithms.cases import Recorder
from peers.algorithms.drawn import drawn, episodes
from peers.algorithms.record_verl_losses import aggregation, corrections, losses


def main() -> None:
    """Record all of it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    recorder = Recorder("verl", version("verl"), parser.parse_args().out)
    for part in (
        group_advantages,
        token_advantages,
        optimal_baselines,
        aggregation,
        losses,
        penalties,
        corrections,
    ):
        part(recorder)
    recorder.close()


def group_advantages(recorder: Recorder) -> None:
    """Advantages of episodes in groups."""
    names = {
        "grpo": core_algos.compute_grpo_outcome_advantage,
        "grpo_vectorized": core_algos.compute_grpo_vectorized_outcome_advantage,
        "grpo_passk": core_algos.compute_grpo_passk_outcome_advantage,
        "rloo": core_algos.compute_rloo_outcome_advantage,
        "rloo_vectorized": core_algos.compute_rloo_vectorized_outcome_advantage,
        "opo": core_algos.compute_opo_outcome_advantage,
        "gpg": core_algos.compute_gpg_outcome_advantage,
        "reinforce_plus_plus_baseline": core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage,
    }
    for name, function in names.items():
        for draw in drawn(name):
            batch = episodes(draw, alone=name != "grpo_passk")
            options: dict[str, Any] = {}
            if name.startswith("grpo"):
                options = {"epsilon": draw.choice((1e-6, 1e-4)), "norm_adv_by_std_in_grpo": draw.chance(0.7)}
            config = AlgoConfig(norm_adv_by_std_in_grpo=options.get("norm_adv_by_std_in_grpo", True))

            def call(
                given: dict[str, Any],
                function: Callable = function,
                options: Any = options,
                config: Any = config,
            ) -> Any:
                advantages, _ = function(
                    token_level_rewards=given["rewards"],
                    response_mask=given["mask"].to(given["rewards"].dtype),
                    index=np.array([f"prompt {each}" for each in given["groups"]]),
                    config=config,
                    **options,
                )
                return {"advantages": advantages}

            recorder.record(f"advantage/{name}", options, batch, call)
    for draw in drawn("remax"):
        batch = episodes(draw, turns=True)
        greedy = draw.normal(max(batch["groups"]) + 1)
        batch["greedy"] = greedy[torch.tensor(batch["groups"])]
        recorder.record("advantage/remax", {}, batch, remax)
    for draw in drawn("gdpo"):
        batch = episodes(draw)
        rows = len(batch["mask"])
        parts = {
            "format": draw.scores(batch["groups"]).float(),
            "accuracy": draw.scores(batch["groups"]).float(),
        }
        options = {
            "norm_adv_by_std_in_grpo": draw.chance(0.7),
            "gdpo_reward_weights": draw.choice((None, [0.5, 2.0])),
        }
        del batch["rewards"]
        batch["mask"] = draw.mask(rows, 12, empty=0.0)
        recorder.record(
            "advantage/gdpo", options, {**batch, **parts}, lambda given, options=options: gdpo(given, options)
        )


def remax(given: dict[str, Any]) -> dict[str, Tensor]:
    """Returns less the greedy episode's."""
    advantages, returns = core_algos.compute_remax_outcome_advantage(
        given["rewards"], given["greedy"], given["mask"].double()
    )
    return {"advantages": advantages, "returns": returns}


def gdpo(given: dict[str, Any], options: dict[str, Any]) -> dict[str, Tensor]:
    """Several rewards, each by its group; in float32, as the function makes its scores."""
    mask = given["mask"].double()
    rewards = torch.zeros(mask.shape)
    advantages, _ = core_algos.compute_gdpo_outcome_advantage(
        rewards,
        mask,
        np.array(given["groups"]),
        norm_adv_by_std_in_grpo=options["norm_adv_by_std_in_grpo"],
        config={
            "gdpo_reward_keys": ["format", "accuracy"],
            "gdpo_reward_weights": options["gdpo_reward_weights"],
        },
        non_tensor_batch={name: given[name].numpy() for name in ("format", "accuracy")},
        batch={
            "prompts": torch.zeros(len(mask), 1),
            "attention_mask": torch.cat([torch.ones(len(mask), 1), mask], 1).long(),
        },
    )
    return {"advantages": advantages}


def token_advantages(recorder: Recorder) -> None:
    """Advantages of tokens."""
    for draw in drawn("gae", 40):
        batch = episodes(draw, turns=True)
        batch["values"] = draw.normal(*batch["mask"].shape)
        options = {"gamma": draw.choice((1.0, 0.99, 0.9)), "lam": draw.choice((1.0, 0.95, 0.5, 0.0))}

        def gae(given: dict[str, Any], options: Any = options) -> Any:
            advantages, returns = core_algos.compute_gae_advantage_return(
                given["rewards"], given["values"], given["mask"].double(), **options
            )
            return {"advantages": advantages, "returns": returns}

        recorder.record("advantage/gae", options, batch, gae)
    for draw in drawn("reinforce_plus_plus", 40):
        batch = episodes(draw, turns=True)
        options = {"gamma": draw.choice((1.0, 0.99, 0.9))}

        def returns(given: dict[str, Any], options: Any = options) -> Any:
            advantages, returns = core_algos.compute_reinforce_plus_plus_outcome_advantage(
                given["rewards"], given["mask"].double(), AlgoConfig(**options)
            )
            return {"advantages": advantages, "returns": returns}

        recorder.record("advantage/reinforce_plus_plus", options, batch, returns)
    for draw in drawn("masked_whiten"):
        mask = draw.mask(draw.whole(1, 8), 10)
        batch = {"mask": mask, "values": 3 * draw.normal(*mask.shape) + 1}
        recorder.record(
            "masked_whiten",
            {},
            batch,
            lambda given: {"values": torch_functional.masked_whiten(given["values"], given["mask"].double())},
        )


def optimal_baselines(recorder: Recorder) -> None:
    """The optimal token baseline, of one turn and of several."""
    names = {
        "optimal_token_baseline": core_algos.compute_optimal_token_baseline_advantage,
        "tir_optimal_token_baseline": core_algos.compute_multi_turn_optimal_token_baseline_advantage,
    }
    for name, function in names.items():
        for draw in drawn(name):
            batch = episodes(draw, turns=True)
            if name == "optimal_token_baseline":
                batch["mask"] = draw.mask(len(batch["groups"]), 12, holes=False)
                batch["rewards"] = draw.rewards(batch["mask"], draw.scores(batch["groups"]))
            shape = batch["mask"].shape
            batch["old"] = draw.logprobs(*shape)
            batch["squared_probabilities"] = batch["old"].exp().square() + 0.1 * draw.normal(*shape).abs()
            options = {"handle_zero_tail": draw.chance(0.6)}

            def call(given: dict[str, Any], function: Callable = function, options: Any = options) -> Any:
                advantages, returns = function(
                    given["rewards"],
                    given["mask"].double(),
                    np.array(given["groups"]),
                    given["old"],
                    given["squared_probabilities"],
                    **options,
                )
                return {"advantages": advantages, "returns": returns}

            recorder.record(f"advantage/{name}", options, batch, call)


def penalties(recorder: Recorder) -> None:
    """Estimates of the divergence, and the controller of its weight."""
    for name in ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "k1+", "abs+", "k3+", "low_var_kl+"):
        for draw in drawn(name, 20):
            mask = draw.mask(4, 10)
            reference = draw.logprobs(4, 10)
            # Far enough for the bounds of k3.
            current = draw.near(reference, draw.choice((0.1, 1.0, 5.0)))
            recorder.record(
                "kl_penalty/" + name,
                {"kl_penalty": name},
                {"mask": mask, "logprobs": current, "reference": reference},
                lambda given, name=name: {
                    "kl": core_algos.kl_penalty(given["logprobs"], given["reference"], name)
                },
                differentiate=("logprobs",),
                gradient_of="kl",
                everywhere=("kl",),
            )
    for draw in drawn("compute_rewards", 20):
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
    for name in ("k1", "abs", "k2", "k3"):
        for draw in drawn(f"apply_kl_penalty {name}", 10):
            batch = episodes(draw, turns=True)
            batch["old"] = draw.logprobs(*batch["mask"].shape)
            batch["reference"] = draw.near(batch["old"])
            options = {"kl_penalty": name, "kl_ratio": draw.choice((0.001, 0.1))}
            recorder.record(
                f"apply_kl_penalty/{name}",
                options,
                batch,
                lambda given, options=options: penalised(given, options),
            )
    for draw in drawn("adaptive_kl", 20):
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


def penalised(given: dict[str, Any], options: dict[str, Any]) -> dict[str, Tensor]:
    """Rewards less the penalty, as the trainer takes it off."""
    data = DataProto.from_dict(
        {
            "response_mask": given["mask"].double(),
            "token_level_scores": given["rewards"],
            "old_log_probs": given["old"],
            "ref_log_prob": given["reference"],
        }
    )
    controller = core_algos.FixedKLController(options["kl_ratio"])
    data, _ = ray_trainer.apply_kl_penalty(data, controller, options["kl_penalty"])
    return {"rewards": data.batch["token_level_rewards"]}


def adaptive(given: dict[str, Any], options: dict[str, Any]) -> dict[str, float]:
    """The coefficient after an update."""
    controller = core_algos.AdaptiveKLController(
        options["init_kl_coef"], options["target_kl"], options["horizon"]
    )
    controller.update(given["kl"], options["n_steps"])
    return {"coefficient": float(controller.value)}


if __name__ == "__main__":
    main()
