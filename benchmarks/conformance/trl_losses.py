"""Losses and gradients of sft, dpo, reward and distill beside TRL's, on TRL's own batches and the same tiny model.

In an environment with TRL (1.16) and this repository on the path:

    PYTHONPATH=. python benchmarks/conformance/trl_losses.py

TRL's trainers tokenize, collate and compute; ours gets the ids and masks of their batch, and takes one step of plain
gradient descent through the backend, cut into micro-batches of a few rows. Written: the difference of the loss (both
are in float32: of one above 1 the difference in relation to it counts), and the largest of any entry of the gradient in
relation to its norm; and small numbers for the tests
(`benchmarks/results/trl_losses.json`).
"""

import json
import os
import tempfile
from collections.abc import Callable, Sequence
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
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.gkd import GKDTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from trainer.algorithms.aggregation import Denominators
from trainer.algorithms.loss_settings import PreferenceLossSettings
from trainer.algorithms.preference import strength
from trainer.backends.base import TrainRow
from trainer.backends.distillation_head import Distance, DistillationHead
from trainer.backends.heads import Head, PolicyHead, ValueHead
from trainer.backends.optimizer import Schedule
from trainer.backends.torch_backend import TorchBackend
from trainer.config.optimizer import OptimizerSettings
from trainer.learn.distilling import mean_loss
from trainer.learn.pipelines.example_rows import whole_text
from trainer.learn.pipelines.preferences import Preference, PreferenceRows, Ranking, reference_sums
from trainer.learn.pipelines.sft import Imitation
from trainer.models.reward_model import RewardModel
from trainer.models.tiny import TinyPolicySettings, build_tiny_model
from trainer.models.tokenizer import build_tiny_tokenizer

RESULT = Path(__file__).resolve().parents[1] / "results" / "trl_losses.json"
TOLERANCE = 1e-6
PAIRS = [
    ("Left or Right?", "Left.", "Right, I think."),
    ("Up?", "Up, then Down.", "No."),
    ("What is 12 + 30?", "The answer is 42.", "41"),
    ("Move.", "Down", "Down Down Down"),
]
OFF: dict[str, Any] = {
    "report_to": "none",
    "use_cpu": True,
    "bf16": False,
    "per_device_train_batch_size": len(PAIRS),
    "gradient_checkpointing": False,
    "remove_unused_columns": False,
    "disable_tqdm": True,
    "logging_strategy": "no",
    "save_strategy": "no",
}


def tiny(seed: int) -> Any:
    """A policy of one layer whose distributions are far from uniform."""
    tokenizer = build_tiny_tokenizer()
    shape = TinyPolicySettings(
        len(tokenizer),
        hidden_size=16,
        layers=1,
        heads=2,
        max_length=128,
        end_id=tokenizer.eos_token_id,
        pad_id=tokenizer.pad_token_id,
    )
    model = build_tiny_model(shape, seed).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3.0)
    return model


def saved(model: Any, folder: Path) -> str:
    """Write a model where TRL can load it."""
    model.save_pretrained(folder)
    build_tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def ours(head: Head, work: Callable[[TorchBackend], float]) -> tuple[float, dict[str, Tensor]]:
    """Return loss and gradients of one step through the backend."""
    settings = OptimizerSettings(
        kind="sgd", learning_rate=1e-3, gradient_clip=1e9, tokens_per_micro_batch=48, shared_prefixes="off"
    )
    backend = TorchBackend(head, settings, Schedule(1e-3, 0, 1, "constant"))
    found: dict[str, Tensor] = {}

    def note(*_: Any) -> None:
        for name, parameter in head.model.named_parameters():
            if parameter.grad is not None:
                found[name] = parameter.grad.clone()

    backend._optimizer.register_step_pre_hook(note)
    return work(backend), found


def theirs(model: Any, loss: Tensor) -> tuple[float, dict[str, Tensor]]:
    """Return TRL's loss and its gradients."""
    model.zero_grad()
    loss.backward()
    return float(loss), {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def compared(
    name: str, own: tuple[float, dict[str, Tensor]], other: tuple[float, dict[str, Tensor]]
) -> dict[str, Any]:
    """Return how far the two are apart."""
    norm = torch.cat([each.flatten() for each in other[1].values()]).norm()
    assert own[1].keys() == other[1].keys(), own[1].keys() ^ other[1].keys()
    worst = max(float((own[1][key] - other[1][key]).abs().max()) for key in own[1])
    result = {
        "case": name,
        "loss": other[0],
        "loss_difference": abs(own[0] - other[0]),
        "gradient_norm": float(norm),
        "gradient_difference": worst / max(float(norm), 1e-12),
    }
    print(f"{name:<24} loss {other[0]:.6f}  off by {result['loss_difference']:.1e}", end="")
    print(f"  gradient off by {result['gradient_difference']:.1e} of its norm", flush=True)
    return result


def rows_of(ids: Tensor, attention: Tensor, learnt: Tensor) -> list[TrainRow]:
    """Return the rows of a padded batch."""
    rows = []
    for line, there, mask in zip(ids, attention.bool(), learnt.bool(), strict=True):
        kept = mask[there].clone()
        kept[0] = False
        rows.append(TrainRow(line[there], kept))
    return rows


def data(kind: str) -> Dataset:
    """Return the examples in the form that a trainer of TRL takes."""

    def said(role: str, text: str) -> list[dict[str, str]]:
        return [{"role": role, "content": text}]

    if kind == "sft":
        rows = [{"messages": said("user", q) + said("assistant", a)} for q, a, _ in PAIRS]
    elif kind == "kto":
        rows = [
            {"prompt": said("user", q), "completion": said("assistant", text), "label": good}
            for q, a, b in PAIRS[:2]
            for text, good in ((a, True), (b, False))
        ]
    else:
        rows = [
            {"prompt": said("user", q), "chosen": said("assistant", a), "rejected": said("assistant", b)}
            for q, a, b in PAIRS
        ]
    return Dataset.from_list(rows)


def batch_of(trainer: Any) -> dict[str, Any]:
    """Return the first batch of a trainer of TRL's."""
    return dict(next(iter(trainer.get_train_dataloader())))


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


def preference(
    folder: Path, name: str, settings: PreferenceLossSettings, **config: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """One of the losses of TRL's DPOTrainer."""
    path, reference = saved(tiny(1), folder / "policy"), saved(tiny(2), folder / "reference")
    args = trl.DPOConfig(str(folder), **OFF, max_length=128, beta=strength(settings), **config)
    trainer = trl.DPOTrainer(
        AutoModelForCausalLM.from_pretrained(path),
        ref_model=AutoModelForCausalLM.from_pretrained(reference),
        args=args,
        train_dataset=data("dpo"),
        processing_class=build_tiny_tokenizer(),
    )
    batch = batch_of(trainer)
    trainer.model.eval()
    other = theirs(trainer.model, trainer.compute_loss(trainer.model, dict(batch)))
    flat = rows_of(batch["input_ids"], batch["attention_mask"], batch["completion_mask"])
    half = len(flat) // 2
    examples = PreferenceRows(list(zip(flat[:half], flat[half:], strict=True)))
    return preferred(name, path, reference, settings, examples, other)


def preferred(
    name: str,
    path: str,
    reference: str | None,
    settings: PreferenceLossSettings,
    examples: PreferenceRows,
    other: tuple[float, dict[str, Tensor]],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Take our step on the same examples; returns the comparison and the numbers for the tests."""
    from trainer.backends.reference import FrozenModel

    sums = torch.zeros(len(examples.rows), 2, dtype=torch.float64)
    if reference is not None:
        frozen = FrozenModel(PolicyHead(AutoModelForCausalLM.from_pretrained(reference), 1.0), 64)
        sums = reference_sums(frozen, examples)
    policy = AutoModelForCausalLM.from_pretrained(path)
    seen = reference_sums(FrozenModel(PolicyHead(policy, 1.0), 64), examples)

    def work(backend: TorchBackend) -> float:
        empty = PreferenceRows([])
        learnt = Preference(backend, settings, examples, sums, empty, sums[:0], 1)
        return learnt.update(range(len(examples.rows)))["preference/loss"]

    golden = {
        "settings": settings.model_dump(mode="json"),
        "policy": seen.tolist(),
        "reference": sums.tolist(),
        "tokens": [[int(row.mask.sum()) for row in pair] for pair in examples.rows],
        "good": list(examples.good),
        "loss": other[0],
    }
    return compared(name, ours(PolicyHead(policy, 1.0), work), other), golden


def kto(folder: Path, settings: PreferenceLossSettings) -> tuple[dict[str, Any], dict[str, Any]]:
    """TRL's KTOTrainer."""
    path, reference = saved(tiny(1), folder / "policy"), saved(tiny(2), folder / "reference")
    args = trl.KTOConfig(
        str(folder),
        **OFF,
        max_length=128,
        beta=strength(settings),
        desirable_weight=settings.desirable_weight,
        undesirable_weight=settings.undesirable_weight,
    )
    trainer = trl.KTOTrainer(
        AutoModelForCausalLM.from_pretrained(path),
        ref_model=AutoModelForCausalLM.from_pretrained(reference),
        args=args,
        train_dataset=data("kto"),
        processing_class=build_tiny_tokenizer(),
    )
    batch = batch_of(trainer)
    trainer.model.eval()
    other = theirs(trainer.model, trainer.compute_loss(trainer.model, dict(batch)))
    own = rows_of(batch["input_ids"], batch["attention_mask"], batch["completion_mask"])
    mixed = rows_of(batch["KL_input_ids"], batch["KL_attention_mask"], batch["KL_completion_mask"])
    good = [bool(label) for label in batch["label"]]
    examples = PreferenceRows(list(zip(own, mixed, strict=True)), good=good)
    return preferred("kto", path, reference, settings, examples, other)


def without_reference(
    folder: Path, name: str, settings: PreferenceLossSettings, config: Any, trainer_class: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """TRL's ORPOTrainer and CPOTrainer (SimPO), which compare with no reference."""
    path = saved(tiny(1), folder / "policy")
    trainer = trainer_class(
        AutoModelForCausalLM.from_pretrained(path),
        args=config,
        train_dataset=data("dpo"),
        processing_class=build_tiny_tokenizer(),
    )
    batch = batch_of(trainer)
    trainer.model.eval()
    loss, _ = trainer.get_batch_loss_metrics(trainer.model, batch)
    sides = [
        rows_of(batch[f"{side}_input_ids"], batch[f"{side}_attention_mask"], batch[f"{side}_labels"] != -100)
        for side in ("chosen", "rejected")
    ]
    examples = PreferenceRows(list(zip(*sides, strict=True)))
    if name == "orpo":
        # TRL's likelihood is that of prompt and reply; the paper's, and ours, that of the reply. All else is compared.
        forward = trainer.concatenated_forward(trainer.model, batch)
        reply = forward[0] * torch.tensor([float(row.mask.sum()) for row in sides[0]])
        loss = loss - forward[4] - reply.sum() / sum(int(row.mask.sum()) for row in sides[0])
    return preferred(name, path, None, settings, examples, theirs(trainer.model, loss))


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
    kind = PreferenceLossSettings
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        compare.append(sft(folder))
        paired: Sequence[tuple[str, PreferenceLossSettings, dict[str, Any]]] = [
            ("dpo", kind(kind="dpo"), {"loss_type": "sigmoid"}),
            (
                "robust",
                kind(kind="robust", label_smoothing=0.2),
                {"loss_type": "robust", "label_smoothing": 0.2},
            ),
            ("hinge", kind(kind="hinge"), {"loss_type": "hinge"}),
            ("ipo", kind(kind="ipo"), {"loss_type": "ipo"}),
        ]
        for name, settings, config in paired:
            result, numbers = preference(folder, name, settings, **config)
            compare.append(result)
            golden["preferences"][name] = numbers
        weights = kind(kind="kto", desirable_weight=1.5, undesirable_weight=0.5)
        result, golden["preferences"]["kto"] = kto(folder, weights)
        compare.append(result)
        orpo = ORPOConfig(str(folder), **OFF, max_length=128, beta=0.1)
        simpo = CPOConfig(
            str(folder), **OFF, max_length=128, beta=2.0, loss_type="simpo", cpo_alpha=0.0, simpo_gamma=1.0,
            label_smoothing=0.1,
        )  # fmt: skip
        for name, settings, config, trainer_class in (
            ("orpo", kind(kind="orpo"), orpo, ORPOTrainer),
            ("simpo", kind(kind="simpo", label_smoothing=0.1), simpo, CPOTrainer),
        ):
            result, golden["preferences"][name] = without_reference(
                folder, name, settings, config, trainer_class
            )
            compare.append(result)
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
