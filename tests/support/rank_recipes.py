"""Recipes by which ranks make the small models of the tests; they are sent to other processes."""

import os
import resource
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from rollgym.trainer.algorithms.aggregation import collect
from rollgym.trainer.backends.fsdp2 import fsdp2_backend, fsdp2_model
from rollgym.trainer.backends.heads import PolicyHead, ValueHead
from rollgym.trainer.backends.optimizer import Schedule
from rollgym.trainer.backends.reference import ShardedPolicyWithoutAdapters
from rollgym.trainer.backends.zero import zero_backend
from rollgym.trainer.config.model import LoraSettings
from rollgym.trainer.config.optimizer import OptimizerSettings
from rollgym.trainer.models.lora import add_lora
from rollgym.trainer.models.value_head import ValueModel
from tests.support.megatron_ranks import family_model
from tests.support.tiny_models import adapted_model, sharp_model


def head_of(role: str, seed: int = 0, *, lora: bool = False):
    """The head of one of the small models, in whatever process."""
    model = sharp_model(seed)
    if lora:
        add_lora(model, LoraSettings(rank=2, alpha=4.0), seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.fill_(0.1)
    return ValueHead(ValueModel(model)) if role == "critic" else PolicyHead(model, 1.0)


@dataclass(frozen=True)
class Recipe:
    """A small model's part in a rank.

    Attributes:
        kind: What divides it.
        role: "policy", "critic" or "reference".
        options: Further arguments of the backend.
    """

    kind: str
    role: str
    optimizer: OptimizerSettings
    rate: float
    options: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    lora: bool = False
    warm: bool = False

    def __call__(self, group, backends):
        torch.set_num_threads(1)
        if self.role == "base":
            return ShardedPolicyWithoutAdapters(backends["policy"], warm=self.warm)
        head = head_of(self.role, self.seed, lora=self.lora) if group.rank == 0 else None
        if self.role == "reference":
            tokens = self.optimizer.micro_batch_tokens
            return fsdp2_model(head, group, dtype=torch.float32, tokens_per_micro_batch=tokens)
        schedule = Schedule(self.rate, 0, 1, "constant")
        if self.kind == "fsdp2":
            return fsdp2_backend(head, group, self.optimizer, schedule, **self.options)
        stage = int(self.kind.removeprefix("zero"))
        return zero_backend(head, group, self.optimizer, schedule, stage=stage, **self.options)


@dataclass(frozen=True)
class Routed:
    """A rank's part of a small mixture of experts.

    Attributes:
        kind: What divides it.
    """

    kind: str
    optimizer: OptimizerSettings

    def __call__(self, group, backends):
        head = PolicyHead(family_model("qwen3_moe"), 1.0) if group.rank == 0 else None
        schedule = Schedule(0.1, 0, 1, "constant")
        if self.kind == "fsdp2":
            return fsdp2_backend(head, group, self.optimizer, schedule)
        stage = int(self.kind.removeprefix("zero"))
        return zero_backend(head, group, self.optimizer, schedule, stage=stage)


@dataclass(frozen=True)
class Adapted:
    """A rank's part of a policy with adapters.

    Attributes:
        kind: What divides it.
    """

    kind: str

    def __call__(self, group, backends):
        head, schedule = PolicyHead(adapted_model(1), 1.0), Schedule(1e-3, 0, 1, "constant")
        if self.kind == "fsdp2":
            return fsdp2_backend(head, group, OptimizerSettings(), schedule)
        stage = int(self.kind.removeprefix("zero"))
        return zero_backend(head, group, OptimizerSettings(), schedule, stage=stage)


def not_finite_at(micro, row):
    """A loss that is infinite where one row of the batch is."""
    worst = torch.where(micro.rows == row, torch.inf, 1.0)
    return (micro.outputs.sum(dim=1) * worst).sum(), {}


def gradient_not_finite_at(micro, row):
    """A loss that is finite, and whose gradient is not where one row of the batch is."""
    loss = micro.outputs.sum() / 20
    if bool((micro.rows == row).any()):
        # The root's slope at nothing is infinite, and infinitely much of nothing is no number.
        loss = loss + (micro.outputs * 0.0).abs().sqrt().sum()
    return loss, {}


FIRST_NUMBER = 2**24 + 1
"""The first whole number that a float32 has not."""


def numbered(rows):
    """Return rows with a number of their own at each token, beside one that is no whole number."""
    return [
        row.with_fields(
            {
                "share": torch.full((len(row.ids),), 0.5),
                "number": torch.full((len(row.ids),), FIRST_NUMBER + 2 * place),
            }
        )
        for place, row in enumerate(rows)
    ]


def numbers_as_given(micro):
    """A loss whose metric is the part of the tokens with the number and the type that `numbered` gave them."""
    number, share = micro.fields["number"], micro.fields["share"]
    given = number == FIRST_NUMBER + 2 * micro.rows[:, None]
    if (number.dtype, share.dtype) != (torch.int64, torch.float32):
        given = torch.zeros_like(given)
    return micro.outputs.sum() / 20, collect({"as_given": (given.sum(), (share > 0).sum())})


def loss_with_entropy(micro):
    """A loss that reads all that a policy's head computes."""
    loss = ((micro.outputs + 0.1 * micro.entropy) * micro.mask).sum() / 20
    return loss, collect({"loss": (loss.detach(), torch.ones(()))})


def killed_at(micro, row):
    """A loss that ends the process that computes one row of the batch, while the others wait for its gradients."""
    if bool((micro.rows == row).any()):
        os.kill(os.getpid(), signal.SIGKILL)
    return micro.outputs.sum() / 20, {}


def stopped_at(micro, row):
    """A loss that has the process of one row stand still for ever, as on a machine that hangs."""
    if bool((micro.rows == row).any()):
        os.kill(os.getpid(), signal.SIGSTOP)
    return micro.outputs.sum() / 20, {}


def impatient(group, backends):
    """Make a rank's part of a policy; from then on, ranks wait for each other no longer than a moment."""
    group.timeout = timedelta(seconds=3)
    return Recipe("fsdp2", "policy", OptimizerSettings(), 1e-3)(group, backends)


@dataclass(frozen=True)
class Moved:
    """A policy whose engine moves what it holds as on an accelerator, though all of it is the processor's memory.

    Attributes:
        recipe: Makes the policy, which ZeRO divides.
    """

    recipe: Callable[..., Any]

    def __call__(self, group, backends):
        backend = self.recipe(group, backends)
        masters = backend._optimizer.masters
        backend.offload, backend.onload = masters.offload, masters.reload
        return backend


@dataclass(frozen=True)
class DyingInASave:
    """A policy one rank of which ends itself in its second save.

    Attributes:
        recipe: Makes the policy.
        rank: Which one.
        when: "its own", when its pieces are written and nothing says so yet, or "all written".
    """

    recipe: Callable[..., Any]
    rank: int
    when: str

    def __call__(self, group, backends):
        backend = self.recipe(group, backends)
        write, saves = backend.write_pieces, []

        def write_pieces(folder):
            saves.append(folder)
            if len(saves) == 2 and group.rank == self.rank:
                name = {"its own": "write_data", "all written": "finish"}[self.when]
                setattr(FileSystemWriter, name, last(getattr(FileSystemWriter, name)))
            write(folder)

        def last(call):
            def called(*arguments, **named):
                call(*arguments, **named)
                os.kill(os.getpid(), signal.SIGKILL)

            return called

        backend.write_pieces = write_pieces
        return backend


@dataclass(frozen=True)
class OnAFullDisk:
    """A policy of ranks that cannot write any file larger than a few kilobytes.

    Attributes:
        rank: Which one cannot write its pieces, from its second checkpoint on; the model can be written by none.
    """

    optimizer: OptimizerSettings
    rank: int

    def __call__(self, group, backends):
        backend = Recipe("fsdp2", "policy", self.optimizer, 1e-3)(group, backends)
        write, save, saves = backend.write_pieces, backend.save, []

        def fill():
            most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, most))

        def write_pieces(folder):
            saves.append(folder)
            if len(saves) == 2 and group.rank == self.rank:
                fill()
            write(folder)

        def save_model(folder, exact):
            fill()
            save(folder, exact)

        backend.write_pieces, backend.save = write_pieces, save_model
        return backend


def dying_in_a_save(recipe, rank, when):
    """Return the recipe."""
    return DyingInASave(recipe, rank, when)
