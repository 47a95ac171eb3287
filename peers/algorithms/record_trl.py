"""Record TRL's GRPO and RLOO trainers, in an interpreter that has TRL (1.16.0):

    PYTHONPATH=. PYTHON -m peers.algorithms.record_trl --out CASES

The trainers' own methods run; what their models would give is what is drawn.
"""

import collections
import inspect
import itertools
import math
import os
import sys
import textwrap
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

from trl.experimental.gmpo.gmpo_trainer import GMPOTrainer
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.rloo_trainer import RLOOTrainer

from peers.algorithms.batches import Batch, drawn_double, drawn_single, recorder_of
from peers.algorithms.cases import Draw, Recorder

DEFAULTS: dict[str, Any] = {
    "loss_type": "dapo",
    "importance_sampling_level": "token",
    "epsilon_low": 0.2,
    "epsilon_high": 0.2,
    "delta": None,
    "beta": 0.0,
    "use_bias_correction_kl": False,
    "top_entropy_quantile": 1.0,
    "off_policy_mask_threshold": None,
    "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05,
    "vespo_k_pos": 2.0,
    "vespo_lambda_pos": 3.0,
    "vespo_k_neg": 3.0,
    "vespo_lambda_neg": 2.0,
    "max_completion_length": 16,
    "entropy_coef": 0.0,
}

KINDS: list[dict[str, Any]] = [
    *({"loss_type": kind} for kind in ("grpo", "bnpo", "dr_grpo", "dapo", "sapo", "vespo")),
    {"loss_type": "cispo", "epsilon_high": 5.0},
    {"loss_type": "cispo", "epsilon_high": 1.28},
    {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4},
    {
        "loss_type": "luspo",
        "importance_sampling_level": "sequence",
        "epsilon_low": 2e-3,
        "epsilon_high": 2.5e-3,
    },
    {"loss_type": "luspo"},
    {"loss_type": "sapo", "importance_sampling_level": "sequence"},
    {"loss_type": "sapo", "sapo_temperature_pos": 0.5, "sapo_temperature_neg": 2.0},
    {"loss_type": "vespo", "vespo_k_pos": 1.0, "vespo_lambda_neg": 1.5},
]
FURTHER: list[dict[str, Any]] = [
    {"delta": 1.5},
    {"delta": 4.0, "epsilon_high": 0.28},
    {"beta": 0.1},
    {"beta": 0.1, "use_bias_correction_kl": True},
    {
        "beta": 0.1,
        "use_bias_correction_kl": True,
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
    },
    {"top_entropy_quantile": 0.2},
    {"top_entropy_quantile": 0.5, "beta": 0.1, "loss_type": "grpo"},
    {"off_policy_mask_threshold": 0.05},
    {"off_policy_mask_threshold": 0.5, "loss_type": "grpo", "beta": 0.05},
    {"entropy_coef": 0.01},
    {"entropy_coef": 0.01, "loss_type": "grpo", "top_entropy_quantile": 0.5},
]
WEIGHTS: list[tuple[str, float | None, float | None]] = [
    ("token_truncate", None, 2.0),
    ("token_truncate", 0.5, 5.0),
    ("token_mask", 0.5, 2.0),
    ("sequence_truncate", None, 3.0),
    ("sequence_mask", None, 3.0),
    ("sequence_mask", 0.5, 2.0),
]


class OneProcess:
    """An accelerator of one process."""

    num_processes = 1
    sync_gradients = False

    def gather(self, tensor: Tensor) -> Tensor:
        """Return what one process has."""
        return tensor

    def pad_across_processes(self, tensor: Tensor, **_: Any) -> Tensor:
        """Return what one process has."""
        return tensor

    def reduce(self, tensor: Tensor, **_: Any) -> Tensor:
        """Return what one process has."""
        return tensor


def trainer(kind: Any, options: dict[str, Any], given: dict[str, Any]) -> Any:
    """Return a trainer whose model gives the log-probabilities and entropies of a case."""
    made = kind.__new__(kind)
    told = {**DEFAULTS, **options}
    for name in (
        *("loss_type", "importance_sampling_level", "epsilon_low", "epsilon_high", "beta", "entropy_coef"),
        *("top_entropy_quantile", "off_policy_mask_threshold", "max_completion_length"),
    ):
        setattr(made, name, told[name])
    made.args = SimpleNamespace(steps_per_generation=1, **told)
    made._entropy_bonus_enabled = told["entropy_coef"] != 0.0
    made.use_adaptive_entropy = made.aux_loss_enabled = made.use_vllm = False
    made.vllm_importance_sampling_correction = False
    made.accelerator, made.model = OneProcess(), SimpleNamespace(training=True)
    made.current_gradient_accumulation_steps = 1
    made._metrics = collections.defaultdict(lambda: collections.defaultdict(list))
    made._get_per_token_logps_and_entropies = lambda *_, **__: (given["logprobs"], given.get("entropy"), None)
    return made


def model_inputs(given: dict[str, Any]) -> dict[str, Any]:
    """Return a case as the batch of a trainer, its first token's column being the prompt."""
    mask = given["mask"].to(given["logprobs"].dtype)
    inputs = {
        "prompt_ids": torch.zeros(len(mask), 1),
        "prompt_mask": torch.ones(len(mask), 1),
        "completion_ids": torch.zeros(mask.shape),
        "completion_mask": mask,
        "advantages": given["advantages"],
        "old_per_token_logps": given["old"],
        "num_items_in_batch": mask.sum(),
    }
    if "reference" in given:
        inputs["ref_per_token_logps"] = given["reference"]
    if "behaviour" in given:
        inputs["sampling_per_token_logps"] = given["behaviour"]
    return inputs


def by_row(batch: Batch, *names: str) -> dict[str, Any]:
    """Return inputs of a loss, with one advantage per row."""
    return {**batch.of("logprobs", "old", *names), "advantages": batch.advantages[:, 0].clone()}


def losses(to: Recorder) -> None:
    """GRPOTrainer._compute_loss: all types of loss and what may be added to them."""
    for options, number in itertools.product([*KINDS, *FURTHER], range(12)):
        _, batch = drawn_double(f"loss/grpo {options}", number)
        names = ["entropy"]
        if options.get("beta"):
            names.append("reference")
        if options.get("off_policy_mask_threshold") and number % 2:
            names.append("behaviour")

        def call(given, options=options):
            made = trainer(GRPOTrainer, options, given)
            return {"loss": made._compute_loss(None, model_inputs(given))}

        extra = (
            "and " + " ".join(sorted(set(options) & {key for each in FURTHER for key in each}))
            if options in FURTHER
            else ""
        )
        name = f"loss/{options.get('loss_type', 'dapo')} {extra}".replace(" and  ", "").strip()
        for plain in ("loss_type", "importance_sampling_level", "epsilon_high"):
            name = name.replace(f" {plain}", "")
        wanted = ["logprobs", "entropy"] if options.get("entropy_coef") else ["logprobs"]
        to.record(name, {**DEFAULTS, **options}, by_row(batch, *names), call, differentiate=wanted)
    for number, (low, high) in itertools.product(range(20), ((0.2, 0.2), (0.4, 0.4))):
        _, batch = drawn_double("loss/gmpo", number)
        options = {"loss_type": "gmpo", "epsilon_low": low, "epsilon_high": high}

        def averaged(given, options=options):
            made = trainer(GMPOTrainer, options, given)
            return {"loss": made._compute_loss(None, model_inputs(given))}

        to.record(
            "loss/gmpo",
            {**DEFAULTS, **options},
            by_row(batch, "entropy"),
            averaged,
            differentiate=["logprobs"],
        )
    for number, (low, high) in itertools.product(range(20), ((0.2, 0.2), (0.2, 0.28))):
        _, batch = drawn_double("loss/rloo", number)
        options = {"epsilon_low": low, "epsilon_high": high}

        def product(given, options=options):
            made = trainer(RLOOTrainer, options, given)
            inputs = model_inputs(given)
            inputs["old_logps"] = (given["old"] * inputs["completion_mask"]).sum(1)
            return {"loss": made._compute_loss(None, inputs)}

        to.record("loss/rloo", options, by_row(batch, "entropy"), product, differentiate=["logprobs"])


def corrections(to: Recorder) -> None:
    """Losses with weights of what vLLM sampled, as the lines of _generate_and_score_completions make them.

    That method generates, so its lines for the weights are compiled out of its source.
    """
    lines = weight_lines()
    for (mode, low, high), kind, number in itertools.product(WEIGHTS, ("dapo", "grpo", "vespo"), range(8)):
        if kind == "vespo" and mode.startswith("sequence"):
            continue
        _, batch = drawn_double(f"loss/{kind} {mode} {low}", number)
        options = {
            "loss_type": kind,
            "vllm_importance_sampling_mode": mode,
            "vllm_importance_sampling_clip_min": low,
            "vllm_importance_sampling_clip_max": high,
        }

        def call(given, options=options):
            made = trainer(GRPOTrainer, options, given)
            made.use_vllm = made.vllm_importance_sampling_correction = True
            for name in ("mode", "clip_min", "clip_max"):
                key = f"vllm_importance_sampling_{name}"
                setattr(made, key, options[key])
            inputs = model_inputs(given)
            names = {
                "self": made,
                "torch": torch,
                "math": math,
                "completion_mask": inputs["completion_mask"],
                "tool_mask": None,
                "old_per_token_logps": given["old"],
                "sampling_per_token_logps": given["behaviour"],
            }
            exec(lines, names)
            inputs["importance_sampling_ratio"] = names["vllm_importance_sampling_ratio"]
            return {"loss": made._compute_loss(None, inputs)}

        to.record(
            f"loss/{kind} with {mode}",
            {**DEFAULTS, **options},
            by_row(batch, "behaviour", "entropy"),
            call,
            differentiate=["logprobs"],
        )


def weight_lines() -> Any:
    """Return the lines that make the weights, compiled."""
    return compiled(
        GRPOTrainer._generate_and_score_completions,
        "if self.use_vllm and self.vllm_importance_sampling_correction:",
        "# Compute the per-token log probabilities for the reference model",
    )


def compiled(method: Any, first: str, last: str) -> Any:
    """Return the lines of a method from one to before another, compiled; the last place where `first` stands."""
    source = inspect.getsource(method)
    stop = source.index(last)
    start = source.rindex(first, 0, stop)
    start = source.rindex("\n", 0, start) + 1
    return compile(textwrap.dedent(source[start : source.rindex("\n", 0, stop) + 1]), method.__name__, "exec")


def advantages(to: Recorder) -> None:
    """Advantages of GRPO (both ways to add rewards, all scales) and of RLOO, from the source of their methods."""
    grpo = compiled(
        GRPOTrainer._generate_and_score_completions,
        "unscorable_mask = ",
        "# Slice to keep only the local part",
    )
    rloo = compiled(
        RLOOTrainer._generate_and_score_completions,
        "unscorable_mask = ",
        "# Slice to keep only the local part",
    )
    forms = [
        *(("sum_then_normalize", scale) for scale in ("group", "batch", "none")),
        ("normalize_then_sum", "group"),
    ]
    for (form, scale), number in itertools.product(forms, range(15)):
        draw = Draw(f"advantage/{form} {scale}", number, torch.float32)
        groups = [group for group in range(3) for _ in range(4)]
        inputs = {
            "rewards": torch.stack([draw.scores(groups), draw.scores(groups)], dim=1),
            "groups": groups,
        }
        weights = draw.choice(([1.0, 1.0], [0.5, 2.0]))
        options = {"multi_objective_aggregation": form, "scale_rewards": scale, "reward_weights": weights}

        def call(given, options=options):
            made = SimpleNamespace(
                reward_funcs=[None, None], reward_weights=torch.tensor(options["reward_weights"])
            )
            made.multi_objective_aggregation = options["multi_objective_aggregation"]
            made.scale_rewards = options["scale_rewards"]
            return run(grpo, GRPOTrainer, made, given)

        to.record(f"advantage/grpo {form}", options, inputs, call)
    for number, (normalised, beta, clip) in itertools.product(
        range(10), ((False, 0.0, None), (True, 0.0, None), (False, 0.1, None), (False, 0.0, (-0.5, 0.5)))
    ):
        draw, batch = drawn_single("advantage/rloo", number, groups=3, size=4)
        options = {
            "normalize_advantages": normalised,
            "beta": beta,
            "reward_clip_range": clip,
            "reward_weights": [1.0],
        }

        def loo(given, options=options):
            made = SimpleNamespace(**options)
            made.reward_weights = torch.tensor([1.0])
            return run(rloo, RLOOTrainer, made, given)

        inputs = {**batch.of("old", "reference", "groups"), "rewards": batch.scores[:, None]}
        to.record("advantage/rloo", options, inputs, loo)


def run(lines: Any, kind: Any, made: Any, given: dict[str, Any]) -> dict[str, Tensor]:
    """Return the advantages that the lines of a trainer's method make."""
    names = dict(vars(sys.modules[kind.__module__]))
    names |= {
        "self": made,
        "rewards_per_func": given["rewards"],
        "num_generations": 4,
        "device": "cpu",
        "gather": lambda tensor: tensor,
        "completion_mask": given.get("mask"),
        "old_per_token_logps": given.get("old"),
        "ref_per_token_logps": given.get("reference"),
    }
    exec(lines, names)
    return {"advantages": names["advantages"]}


if __name__ == "__main__":
    recorder_of("trl", __doc__, (losses, corrections, advantages))
