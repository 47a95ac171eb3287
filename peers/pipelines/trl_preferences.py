"""Losses of preferences beside TRL's: those of its DPO, KTO, ORPO and CPO trainers."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import trl
from torch import Tensor
from transformers import AutoModelForCausalLM
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer
from trl_steps import OFF, batch_of, compared, data, ours, rows_of, saved, theirs, tiny

from rollgym.trainer.algorithms.loss_settings import PreferenceLossSettings
from rollgym.trainer.algorithms.preference import strength
from rollgym.trainer.backends.forward_pass import ForwardPass
from rollgym.trainer.backends.heads import PolicyHead
from rollgym.trainer.backends.reference import FrozenModel
from rollgym.trainer.backends.torch_backend import TorchBackend
from rollgym.trainer.learn.pipelines.preferences import Preference, PreferenceRows, reference_sums
from rollgym.trainer.models.tiny import build_tiny_tokenizer


def preferences(folder: Path) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """All of them: the name, the comparison and the numbers for the tests."""
    kind = PreferenceLossSettings
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
        yield name, *preference(folder, name, settings, **config)
    weights = kind(kind="kto", desirable_weight=1.5, undesirable_weight=0.5)
    yield "kto", *kto(folder, weights)
    orpo = ORPOConfig(str(folder), **OFF, max_length=128, beta=0.1)
    simpo = CPOConfig(
        str(folder), **OFF, max_length=128, beta=2.0, loss_type="simpo", cpo_alpha=0.0, simpo_gamma=1.0,
        label_smoothing=0.1,
    )  # fmt: skip
    for name, settings, config, trainer_class in (
        ("orpo", kind(kind="orpo"), orpo, ORPOTrainer),
        ("simpo", kind(kind="simpo", label_smoothing=0.1), simpo, CPOTrainer),
    ):
        yield name, *without_reference(folder, name, settings, config, trainer_class)


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
    sums = torch.zeros(len(examples.rows), 2, dtype=torch.float64)
    if reference is not None:
        frozen = FrozenModel(
            ForwardPass(PolicyHead(AutoModelForCausalLM.from_pretrained(reference), 1.0), 64)
        )
        sums = reference_sums(frozen, examples)
    policy = AutoModelForCausalLM.from_pretrained(path)
    seen = reference_sums(FrozenModel(ForwardPass(PolicyHead(policy, 1.0), 64)), examples)

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
