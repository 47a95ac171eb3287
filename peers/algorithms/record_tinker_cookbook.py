"""Record the tinker cookbook's functions, in an interpreter that has it (0.6.1):

PYTHONPATH=. PYTHON -m peers.algorithms.record_tinker_cookbook --out CASES
"""

import asyncio
import itertools
from types import SimpleNamespace
from typing import Any

import torch

from peers.algorithms.absent import AbsentPackages
from peers.algorithms.batches import drawn_single, recorder_of
from peers.algorithms.cases import Draw, Recorder

AbsentPackages("blobfile").install()

import tinker
from tinker_cookbook.distillation import sdft
from tinker_cookbook.preference.train_dpo import compute_dpo_loss
from tinker_cookbook.rl import metrics
from tinker_cookbook.rl.data_processing import compute_advantages

CASES = 30


def advantages(to: Recorder) -> None:
    """compute_advantages of groups."""
    for number in range(CASES):
        draw = Draw("advantage/centred", number, torch.float32)
        groups = sorted(draw.groups(10))

        def call(given):
            places = [[at for at, each in enumerate(given["groups"]) if each == group] for group in range(10)]
            made = compute_advantages(
                [
                    SimpleNamespace(
                        get_total_rewards=lambda at=at: [float(given["scores"][row]) for row in at]
                    )
                    for at in places
                    if at
                ]
            )
            return {"advantages": torch.cat(made)}

        to.record("advantage/compute_advantages", {}, {"scores": draw.scores(groups), "groups": groups}, call)


def data_of(given: dict[str, Any]) -> list[Any]:
    """Return a row of a case as the cookbook has it."""
    return [
        SimpleNamespace(
            loss_fn_inputs={
                "logprobs": tinker.TensorData.from_torch(logprobs),
                "mask": tinker.TensorData.from_torch(mask.float()),
                "advantages": tinker.TensorData.from_torch(advantages),
            }
        )
        for logprobs, mask, advantages in zip(given["old"], given["mask"], given["advantages"], strict=True)
    ]


def penalties(to: Recorder) -> None:
    """incorporate_kl_penalty, and the divergences that are reported."""
    for number in range(15):
        _, batch = drawn_single("kl/penalty 0.0", number)
        options = {"kl_penalty_coef": 0.3, "kl_discount_factor": 0.0}

        async def scored(client, sequences, rows=batch):
            del client, sequences
            # The first token has nothing before it, and no log-probability.
            return [[None, *row.tolist()] for row in rows.reference], None

        def penalised(given, options=options, scored=scored):
            data = data_of(given)
            metrics.score_sequences, metrics._full_sequence_inputs = scored, lambda data: data
            asyncio.run(metrics.incorporate_kl_penalty(data, None, **options))
            found = torch.stack([each.loss_fn_inputs["advantages"].to_torch() for each in data])
            return {"advantages": found}

        inputs = batch.of("old", "reference", "advantages")
        to.record("kl/incorporate_kl_penalty", options, inputs, penalised)
    for number in range(CASES):
        _, batch = drawn_single("kl/sample_train", number)

        def compared(given):
            found = metrics.compute_kl_sample_train(data_of(given), list(given["logprobs"]))
            return {
                "k1": found["optim/kl_sample_train_v1"],
                "k2": found["optim/kl_sample_train_v2"],
            }

        to.record("kl/compute_kl_sample_train", {}, batch.of("old", "logprobs", "advantages"), compared)
    for number, discount in itertools.product(range(15), (0.5, 0.9)):
        draw = Draw("returns/discounted", number)

        def summed(given, discount=discount):
            rows = [metrics.discounted_future_sum_vectorized(row, discount) for row in given["rewards"]]
            return {"returns": torch.stack(rows)}

        inputs = {"rewards": draw.normal(4, 12)}
        to.record("returns/discounted_future_sum_vectorized", {"gamma": discount}, inputs, summed)


def losses(to: Recorder) -> None:
    """DPO, and the reverse divergence over a teacher's likeliest tokens."""
    for number, beta in itertools.product(range(15), (0.1, 0.5)):
        draw = Draw("loss/dpo", number)
        names = ("chosen", "rejected", "chosen_reference", "rejected_reference")

        def preferred(given, beta=beta, names=names):
            return {"loss": compute_dpo_loss(*(list(given[name]) for name in names), beta)[0]}

        inputs = {name: -10 * draw.normal(5).abs() for name in names}
        to.record("loss/dpo", {"dpo_beta": beta}, inputs, preferred, differentiate=["chosen", "rejected"])
    for number in range(CASES):
        draw = Draw("loss/reverse_kl", number)
        teacher = torch.softmax(draw.normal(7, 5), dim=-1)

        def reversed_kl(given):
            datum = SimpleNamespace(
                loss_fn_inputs={"weights": SimpleNamespace(to_torch=lambda: given["teacher"])}
            )
            return {"loss": sdft.reverse_kl_custom_loss([datum], [given["student"]])[0]}

        inputs = {"student": torch.log_softmax(draw.normal(7, 6), dim=-1)[:, :5], "teacher": teacher}
        to.record("loss/reverse_kl_custom_loss", {}, inputs, reversed_kl, differentiate=["student"])


if __name__ == "__main__":
    recorder_of("tinker_cookbook", __doc__, (advantages, penalties, losses), "tinker-cookbook")
