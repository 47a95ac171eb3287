"""Losses and gradients of sft, dpo, reward and distill beside TRL's, on TRL's own batches and the same tiny model.

In an environment with TRL (1.16) and this repository on the path:

    PYTHONPATH=. python peers/pipelines/trl_losses.py

TRL's trainers tokenize, collate and compute; ours gets the ids and masks of their batch, and takes one step of plain
gradient descent through the backend, cut into micro-batches of a few rows. Written: the difference of the loss (both
are in float32: of one above 1 the difference in relation to it counts), and the largest of any entry of the gradient in
relation to its norm; and small numbers for the tests
(`benchmarks/results/trl_losses.json`).
"""

import json
import os
import tempfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
import transformers
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from trl.experimental.gkd import GKDTrainer
from trl_preferences import preferences
from trl_steps import OFF, PAIRS, batch_of, compared, data, ours, rows_of, saved, theirs, tiny

from rollgym.trainer.algorithms.aggregation import Denominators
from rollgym.trainer.backends.base import TrainRow
from rollgym.trainer.backends.distillation_head import Distance, DistillationHead
from rollgym.trainer.backends.heads import PolicyHead, ValueHead
from rollgym.trainer.backends.torch_backend import TorchBackend
from rollgym.trainer.learn.distilling import mean_loss
from rollgym.trainer.learn.pipelines.example_rows import whole_text
from rollgym.trainer.learn.pipelines.preferences import PreferenceRows, Ranking
from rollgym.trainer.learn.pipelines.sft import Imitation
from rollgym.trainer.models.tiny import build_tiny_tokenizer
from rollgym.trainer.models.value_head import RewardModel

RESULT = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "trl_losses.json"
TOLERANCE = 1e-6


def sft(folder: Path) -> dict[str, Any]:
    """Supervised learning."""
    path = saved(tiny(1), folder / "sft")
    config = trl.SFTConfig(str(folder), **OFF, assistant_only_loss=False, max_length=128)
    rows = [
        {"prompt": [{"role": "user", "content": q}], "completion": [{"role": "assistant", "content": a}]}
        for q, a, _ in PAIRS
    ]
    trainer = trl.SFTTrainer(
        path, args=config, train_dataset=Dataset.from_list(rows), processing_class=build_tiny_tokenizer()
    )
    batch = batch_of(trainer)
    trainer.model.eval()
    other = theirs(trainer.model, trainer.compute_loss(trainer.model, dict(batch)))
    learnt = batch["labels"] != -100
    attention = batch.get("attention_mask")
    attention = torch.ones_like(batch["input_ids"]) if attention is None else attention
    examples = rows_of(batch["input_ids"], attention, learnt)

    def work(backend: TorchBackend) -> float:
        return Imitation(backend, examples).update(range(len(examples)))["supervised/loss"]

    return compared("sft", ours(PolicyHead(AutoModelForCausalLM.from_pretrained(path), 1.0), work), other)


def reward(folder: Path) -> dict[str, Any]:
    """TRL's RewardTrainer, with margins and the pull towards zero."""
    path = saved(tiny(1), folder / "policy")
    config = AutoModelForCausalLM.from_pretrained(path).config
    config.num_labels = 1
    torch.manual_seed(4)
    classifier = AutoModelForSequenceClassification.from_pretrained(path, config=config)
    args = trl.RewardConfig(str(folder), **OFF, max_length=128, center_rewards_coefficient=0.01)
    rows = data("dpo").add_column("margin", [0.5, 0.0, 1.0, 0.25])
    trainer = trl.RewardTrainer(
        classifier, args=args, train_dataset=rows, processing_class=build_tiny_tokenizer()
    )
    batch = batch_of(trainer)
    trainer.model.eval()
    margins = batch["margin"].tolist()
    own_model = RewardModel(AutoModelForCausalLM.from_pretrained(path))
    own_model.body.load_state_dict(classifier.base_model.state_dict())
    with torch.no_grad():
        own_model.head.weight.copy_(classifier.score.weight)
    loss, gradients = theirs(trainer.model, trainer.compute_loss(trainer.model, dict(batch)))
    named = {
        key.replace("model.", "body.", 1) if key.startswith("model.") else key.replace("score", "head"): value
        for key, value in gradients.items()
    }
    flat = [
        whole_text(row)
        for row in rows_of(batch["input_ids"], batch["attention_mask"], batch["attention_mask"])
    ]
    half = len(flat) // 2
    examples = PreferenceRows(list(zip(flat[:half], flat[half:], strict=True)), margins=margins)

    def work(backend: TorchBackend) -> float:
        return Ranking(backend, 0.01, examples, PreferenceRows([]), 1).update(range(half))["reward/loss"]

    return compared("reward", ours(ValueHead(own_model), work), (loss, named))


def distill(folder: Path, beta: float, temperature: float) -> dict[str, Any]:
    """TRL's generalised Jensen-Shannon divergence, on models' logits."""
    student, teacher = tiny(1), tiny(2)
    tokenizer = build_tiny_tokenizer()
    rows = []
    for question, answer, _ in PAIRS:
        prompt, reply = tokenizer.encode(question), tokenizer.encode(answer)
        mask = [False] * len(prompt) + [True] * len(reply)
        rows.append(TrainRow(torch.tensor(prompt + reply), torch.tensor(mask)))
    width = max(len(row.ids) for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    labels = torch.full((len(rows), width), -100)
    for place, row in enumerate(rows):
        ids[place, : len(row.ids)] = row.ids
        labels[place, : len(row.ids)] = torch.where(row.mask, row.ids, -100)
    taught = teacher(ids).logits[:, :-1].detach()
    loss = GKDTrainer.generalized_jsd_loss(
        student(ids).logits[:, :-1], taught, labels[:, 1:], beta=beta, temperature=temperature
    )
    other = theirs(student, loss)
    kind = {0.0: "forward_kl", 1.0: "reverse_kl"}.get(beta, "jsd")
    head = DistillationHead(tiny(1), [teacher], Distance(kind, beta or 0.5, temperature))  # type: ignore[arg-type]

    def work(backend: TorchBackend) -> float:
        counts = Denominators.from_lengths(int(row.mask.sum()) for row in rows)
        taken = backend.step(rows, partial(mean_loss, counts=counts))
        total, number = taken.metrics["distill/loss"]
        return total / number

    return compared(f"distill {kind} T={temperature:g}", ours(head, work), other)


def golden_divergences() -> list[dict[str, Any]]:
    """Return TRL's divergence of small tables of logits, and its gradient by the student's."""
    generator = torch.Generator().manual_seed(7)
    cases = []
    for beta in (0.0, 0.1, 0.5, 0.9, 1.0):
        student = (torch.randn(1, 3, 6, generator=generator) * 2).requires_grad_()
        teacher = torch.randn(1, 3, 6, generator=generator) * 2
        labels = torch.zeros(1, 3, dtype=torch.long)
        loss = GKDTrainer.generalized_jsd_loss(student, teacher, labels, beta=beta, temperature=1.5)
        (gradient,) = torch.autograd.grad(loss, student)
        cases.append(
            {
                "beta": beta,
                "temperature": 1.5,
                "student": student[0].tolist(),
                "teacher": teacher[0].tolist(),
                "loss": float(loss),
                "gradient": gradient[0].tolist(),
            }
        )
    return cases


def main() -> None:
    """Compare everything, and write what came of it."""
    torch.set_num_threads(1)
    compare: list[dict[str, Any]] = []
    golden: dict[str, Any] = {"divergences": golden_divergences(), "preferences": {}}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        compare.append(sft(folder))
        for name, result, numbers in preferences(folder):
            compare.append(result)
            golden["preferences"][name] = numbers
        compare.append(reward(folder))
        compare += [
            distill(folder, beta, temperature) for beta in (0.0, 0.5, 1.0) for temperature in (1.0, 2.0)
        ]
    versions = SimpleNamespace(
        trl=trl.__version__, torch=torch.__version__, transformers=transformers.__version__
    )
    RESULT.write_text(
        json.dumps(
            {"versions": vars(versions), "tolerance": TOLERANCE, "cases": compare, "golden": golden}, indent=1
        )
        + "\n"
    )
    apart = [
        each["case"]
        for each in compare
        if each["loss_difference"] > TOLERANCE * max(1.0, each["loss"])
        or each["gradient_difference"] > TOLERANCE
    ]
    print(f"written {RESULT}; {len(compare)} cases, apart: {', '.join(apart) or 'none'}")


if __name__ == "__main__":
    main()
