"""Recipes by which ranks make the small models of the tests; they are sent to other processes."""

import os
import signal
import time
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.support.tiny_models import adapted_model, sharp_model
from trainer.backends.fsdp2 import fsdp2_backend, fsdp2_model
from trainer.backends.heads import PolicyHead, ValueHead
from trainer.backends.optimizer import Schedule
from trainer.backends.sharded import ShardedPolicyWithoutAdapters
from trainer.backends.zero import zero_backend
from trainer.config.model import LoraSettings
from trainer.config.optimizer import OptimizerSettings
from trainer.models.lora import add_lora
from trainer.models.value_head import ValueModel


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

    def __call__(self, group, backends):
        torch.set_num_threads(1)
        if self.role == "base":
            return ShardedPolicyWithoutAdapters(backends["policy"], warm=False)
        head = head_of(self.role, self.seed, lora=self.lora)
        if self.role == "reference":
            tokens = self.optimizer.tokens_per_micro_batch
            return fsdp2_model(head, group, dtype=torch.float32, tokens_per_micro_batch=tokens)
        schedule = Schedule(self.rate, 0, 1, "constant")
        if self.kind == "fsdp2":
            return fsdp2_backend(head, group, self.optimizer, schedule, **self.options)
        stage = int(self.kind.removeprefix("zero"))
        return zero_backend(head, group, self.optimizer, schedule, stage=stage, **self.options)


def adapted(group, backends):
    """Make a rank's part of a policy with adapters."""
    head = PolicyHead(adapted_model(1), 1.0)
    return fsdp2_backend(head, group, OptimizerSettings(), Schedule(1e-3, 0, 1, "constant"))


class Patient:
    """Something in a rank that does what a test asks it to, and no more."""

    def __init__(self, group):
        self._group = group

    def meet(self):
        """Wait for all the other ranks, as long as it takes."""
        return self._group.largest(self._group.rank)

    def compute(self, seconds):
        """Be busy without an end in sight."""
        time.sleep(seconds)

    def fail(self, rank, message):
        """Raise in one rank, while the others wait for it."""
        if self._group.rank == rank:
            raise ValueError(message)
        return self.meet()

    def die(self, rank, word):
        """End one rank after a last word, while the others wait for it."""
        if self._group.rank == rank:
            os.write(2, word.encode())
            os.kill(os.getpid(), signal.SIGKILL)
        return self.meet()


def patient(group, backends):
    """Make one."""
    return Patient(group)


def not_finite_at(micro, row):
    """A loss that is infinite where one row of the batch is."""
    worst = torch.where(micro.rows == row, torch.inf, 1.0)
    return (micro.outputs.sum(dim=1) * worst).sum(), {}
