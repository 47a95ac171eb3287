"""Record ms-swift's GRPO trainer and its functions, in an interpreter that has ms-swift (4.6.0):

    PYTHONPATH=. PYTHON -m peers.algorithms.record_ms_swift --out CASES

The trainer's own methods run; what its model would give is what is drawn.
"""

import collections
import itertools
from types import SimpleNamespace
from typing import Any

import torch

from peers.algorithms.absent import AbsentPackages
from peers.algorithms.batches import drawn_double, recorder_of
from peers.algorithms.cases import Draw, Recorder

# Another trainer that swift builds upon: the methods that are recorded are swift's own.
AbsentPackages("msgspec", "trl").install()

from swift.rl_core import advantage, grpo_algorithm
from swift.rl_core.data import GRPOBatch
from swift.rlhf_trainers import gkd_loss, grpo_trainer

DEFAULTS: dict[str, Any] = {
    "loss_type": "grpo",
    "importance_sampling_level": "token",
    "epsilon_low": 0.2,
    "epsilon_high": 0.2,
    "delta": None,
    "beta": 0.0,
    "top_entropy_quantile": 1.0,
    "overlong_filter": False,
    "off_policy_sequence_mask_delta": None,
    "tau_pos": 1.0,
    "tau_neg": 1.05,
    "real_tau": 0.5,
    "fipo_gamma": 0.9,
    "fipo_clip_range": 0.2,
    "fipo_clip_high_only": False,
    "fipo_safety_threshold": None,
    "rollout_importance_sampling_mode": None,
    "rollout_importance_sampling_threshold": 2.0,
    "max_completion_length": 16,
}

KINDS: dict[str, list[dict[str, Any]]] = {
    **{kind: [{"loss_type": kind}] for kind in ("grpo", "bnpo", "dr_grpo", "dapo", "real")},
    "cispo": [{"loss_type": "cispo", "epsilon_high": 5.0}, {"loss_type": "cispo", "epsilon_high": 1.28}],
    "sapo": [
        {"loss_type": "sapo"},
        {"loss_type": "sapo", "tau_pos": 0.5, "importance_sampling_level": "sequence"},
    ],
    "fipo": [
        {"loss_type": "fipo"},
        {"loss_type": "fipo", "fipo_clip_high_only": True, "fipo_safety_threshold": 1.5, "delta": 3.0},
    ],
    "gspo": [
        {"importance_sampling_level": level, "epsilon_low": 3e-4, "epsilon_high": 4e-4}
        for level in ("sequence", "sequence_token")
    ],
    "delta": [{"delta": 1.5}, {"delta": 4.0, "loss_type": "bnpo"}],
    "beta": [{"beta": 0.1}, {"beta": 0.1, "loss_type": "dapo"}],
    "top_entropy_quantile": [{"top_entropy_quantile": 0.2}, {"top_entropy_quantile": 0.5, "beta": 0.1}],
    "overlong_filter": [{"overlong_filter": True}, {"overlong_filter": True, "loss_type": "dapo"}],
    "off_policy_sequence_mask": [
        {"off_policy_sequence_mask_delta": 0.05},
        {"off_policy_sequence_mask_delta": 0.05, "loss_type": "dapo"},
    ],
    "rollout_importance_sampling": [
        {"rollout_importance_sampling_mode": mode, "rollout_importance_sampling_threshold": bound}
        for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
        for bound in (1.2, 2.0)
    ],
}


class OneProcess:
    """An accelerator of one process."""

    num_processes = 1

    def gather_for_metrics(self, value: Any) -> Any:
        """Return what one process has."""
        return value


def trainer(options: dict[str, Any], given: dict[str, Any]) -> Any:
    """Return a trainer whose model gives the log-probabilities and entropies of a case."""
    made = grpo_trainer.GRPOTrainer.__new__(grpo_trainer.GRPOTrainer)
    told = {**DEFAULTS, **options}
    further = {
        "args": SimpleNamespace(log_entropy=False, **told),
        "accelerator": OneProcess(),
        "model": SimpleNamespace(training=False),
        "num_generations": 3,
        "kl_in_reward": False,
        "_has_teacher": False,
        "sdar_loss_coef": 0.0,
        "chord_sft_iterator": None,
        "compute_entropy": told["top_entropy_quantile"] < 1.0,
        "log_rollout_offpolicy_metrics": False,
        "disable_rollout_importance_sampling": False,
        "_metrics": collections.defaultdict(lambda: collections.defaultdict(list)),
        "_get_per_token_logps_and_entropies": lambda *_, **__: (given["logprobs"], given["entropy"]),
        "_compute_rollout_offpolicy_metrics": lambda *_: {},
        "_compute_is_correction_metrics": lambda *_: {},
    }
    for name, value in {**told, **further}.items():
        setattr(made, name, value)
    return made


def losses(to: Recorder) -> None:
    """GRPOTrainer._compute_loss_and_metrics: all types of loss, levels, filters and corrections."""
    for name, choices in KINDS.items():
        for options, number in itertools.product(choices, range(12 if len(choices) < 8 else 5)):
            draw, batch = drawn_double(f"loss/{name} {options}", number)
            inputs = batch.of("logprobs", "old", "advantages", "entropy", "groups")
            if options.get("beta"):
                inputs["reference"] = batch.reference
            if "rollout_importance_sampling_mode" in options or (
                name.startswith("off_policy") and number % 2
            ):
                inputs["behaviour"] = batch.behaviour
            if options.get("overlong_filter"):
                inputs["truncated"] = draw.normal(6) < -0.3

            def call(given, options=options):
                made = trainer(options, given)
                mask = given["mask"]
                rows = GRPOBatch(
                    completion_mask=mask,
                    truncated_mask=given.get("truncated", torch.zeros(len(mask), dtype=torch.bool)),
                    seq_lengths=mask.sum(1),
                    old_per_token_logps=given["old"],
                    ref_per_token_logps=given.get("reference"),
                    rollout_per_token_logps=given.get("behaviour"),
                    advantages=given["advantages"],
                    num_items_in_batch=mask.sum(),
                )
                return {"loss": made._compute_loss_and_metrics(None, {}, rows)[0]}

            to.record(f"loss/{name}", {**DEFAULTS, **options}, inputs, call, differentiate=["logprobs"])


def advantages(to: Recorder) -> None:
    """compute_advantages, compute_advantages_dynamic and what a teacher adds to them."""
    estimators = ("grpo", "rloo", "reinforce_plus_plus")
    for estimator, scale, number in itertools.product(
        estimators, ("group", "batch", "none", "gdpo"), range(8)
    ):
        draw = Draw(f"advantage/{estimator} {scale}", number, torch.float32)
        groups = [group for group in range(3) for _ in range(4)]
        kl = draw.chance(0.4) and scale != "gdpo"
        options = {"advantage_estimator": estimator, "scale_rewards": scale, "kl_in_reward": kl, "beta": 0.1}
        weights = draw.choice(([1.0, 1.0], [0.5, 2.0]))
        inputs: dict[str, Any] = {
            "rewards": torch.stack([draw.scores(groups), draw.scores(groups)], dim=1),
            "groups": groups,
        }
        if kl:
            inputs["kl"] = draw.normal(12)

        def call(given, options=options, weights=weights):
            found, _ = advantage.compute_advantages(
                given["rewards"], torch.tensor(weights), 4, kl_values=given.get("kl"), **options
            )
            return {"advantages": found}

        to.record(f"advantage/{estimator}", {**options, "reward_weights": weights}, inputs, call)
        if scale == "gdpo":
            continue
        of_rows = draw.groups(9)
        # Rows of one request have one reward.
        request = [row // 2 if row < 4 else row for row in range(9)]
        scores = draw.scores(of_rows)
        scores[1], scores[3] = scores[0], scores[2]
        of_rows[1], of_rows[3] = of_rows[0], of_rows[2]
        inputs = {"rewards": scores[:, None], "groups": of_rows, "requests": request}

        def dynamic(given, estimator=estimator, scale=scale):
            found, _ = advantage.compute_advantages_dynamic(
                given["rewards"],
                torch.ones(1),
                [str(each) for each in given["groups"]],
                [str(each) for each in given["requests"]],
                estimator,
                scale,
            )
            return {"advantages": found}

        options = {"advantage_estimator": estimator, "scale_rewards": scale}
        to.record(f"advantage/dynamic {estimator}", options, inputs, dynamic)
    for number in range(30):
        draw, batch = drawn_double("advantage/teacher", number)
        inputs = {**batch.of("old", "reference"), "scores": draw.normal(6)}
        options = {"teacher_kl_coef": draw.choice((0.5, 1.0))}

        def expanded(given, options=options):
            names = (given["scores"], given["mask"], given["reference"], given["old"])
            return {"advantages": advantage.expand_advantage_to_per_token(*names, **options)}

        to.record("advantage/expand_advantage_to_per_token", options, inputs, expanded)
        reweighed = {"lam": draw.choice((0.5, 1.0)), "clip_range": 0.2, "negative_only": draw.chance(0.5)}

        def rlsd(given, options=reweighed):
            names = (given["scores"], given["mask"], given["reference"], given["old"])
            return {"advantages": advantage.apply_rlsd_reweight(*names, **options)}

        to.record("advantage/apply_rlsd_reweight", reweighed, inputs, rlsd)


def teachers(to: Recorder) -> None:
    """Losses towards a teacher, and its divergence."""
    for number, mode in itertools.product(
        range(10), ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")
    ):
        _, batch = drawn_double("loss/sdar", number)
        inputs = batch.of("logprobs", "reference")
        options = {"gate_beta": (5.0, 1.0)[number % 2], "loss_agg_mode": mode}

        def gated(given, options=options):
            names = (given["logprobs"], given["reference"], given["mask"])
            return {"loss": advantage.compute_sdar_loss(*names, **options)[0]}

        to.record("loss/sdar", options, inputs, gated, differentiate=["logprobs"])

        def diverged(given):
            names = (given["reference"], given["logprobs"], given["mask"])
            return {"kl": advantage.compute_teacher_kl_per_token(*names)}

        if mode == "token-mean":
            to.record("kl/teacher", {}, inputs, diverged)
    for number, beta in itertools.product(range(10), (0.0, 0.3, 0.5, 1.0)):
        draw = Draw("loss/jsd", number)
        logits = {"student": draw.normal(6, 9), "teacher": draw.normal(6, 9)}

        def jsd(given, beta=beta):
            return {"loss": gkd_loss.jsd_loss(given["student"], given["teacher"], beta)}

        to.record("loss/jsd", {"beta": beta}, logits, jsd, differentiate=["student"])


def filters(to: Recorder) -> None:
    """The deviation that dynamic sampling goes by, and sequence-level weights."""
    for number in range(30):
        draw = Draw("filter/std", number, torch.float32)
        groups = [group for group in range(3) for _ in range(4)]
        inputs = {"rewards": draw.scores(groups)[:, None], "groups": groups}

        def deviation(given):
            found = grpo_algorithm.compute_std_for_dynamic_sampling(given["rewards"], torch.ones(1), 4)
            return {"std": found, "kept": (found > 1e-6).double()}

        to.record("filter/dynamic_sampling", {}, inputs, deviation)


if __name__ == "__main__":
    recorder_of("ms_swift", __doc__, (losses, advantages, teachers, filters), "ms-swift")
