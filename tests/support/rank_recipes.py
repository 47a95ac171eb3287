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
from trainer.config.run import OptimizerSettings
from trainer.models.value_head import ValueModel


def head_of(role: str, seed: int = 0):
    """The head of one of the small models, in whatever process."""
    model = sharp_model(seed)
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

    def __call__(self, group, backends):
        torch.set_num_threads(1)
        head = head_of(self.role, self.seed)
        if self.role == "reference":
            tokens = self.optimizer.tokens_per_micro_batch
            return fsdp2_model(head, group, dtype=torch.float32, tokens_per_micro_batch=tokens)
        schedule = Schedule(self.rate, 0, 1, "constant")
        if self.kind == "fsdp2":
            return fsdp2_backend(head, group, self.optimizer, schedule, **self.options)
        raise AssertionError(self.kind)


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
