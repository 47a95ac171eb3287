"""One step of ours and TRL's loss and gradients, of the same tiny model and on the same examples."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor

from rollgym.trainer.backends.base import TrainRow
from rollgym.trainer.backends.heads import Head
from rollgym.trainer.backends.optimizer import Schedule
from rollgym.trainer.backends.torch_backend import TorchBackend
from rollgym.trainer.config.optimizer import OptimizerSettings
from rollgym.trainer.models.tiny import TinyPolicySettings, build_tiny_model, build_tiny_tokenizer

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
