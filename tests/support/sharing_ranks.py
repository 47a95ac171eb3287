"""A small model's part in a rank, which shares prefixes wherever a few tokens are saved; it is sent to the rank."""

from dataclasses import dataclass
from unittest import mock

import torch

from rollgym.trainer.backends import fsdp2, packing, zero
from rollgym.trainer.backends.heads import PolicyHead, ValueHead
from rollgym.trainer.backends.optimizer import Schedule
from rollgym.trainer.backends.prefix_tree import CallCosts
from rollgym.trainer.config.optimizer import OptimizerSettings
from rollgym.trainer.models.value_head import ValueModel
from tests.support.current_families import model_of
from tests.support.tiny_models import sharp_model

CHEAP = CallCosts(pair=0.0, masked_pair=0.0, copied=0.0, call=4.0, held=0.05)
"""Small models compute a few tokens at little more than what a call takes: by their own costs nothing is shared."""


@dataclass(frozen=True)
class SharingRecipe:
    """How a rank makes its part.

    Attributes:
        kind: What divides it.
        family: The model's; the small policy of other tests if None.
        role: "policy", "critic" or "reference".
    """

    kind: str
    optimizer: OptimizerSettings
    schedule: Schedule
    gradient_checkpointing: bool = False
    family: str | None = None
    role: str = "policy"

    def __call__(self, group, backends):
        torch.set_num_threads(1)
        head = self._head() if group.rank == 0 else None
        options = {"gradient_checkpointing": self.gradient_checkpointing}
        with mock.patch.object(packing, "sharing_costs", costs):
            if self.role == "reference":
                return fsdp2.fsdp2_model(
                    head,
                    group,
                    dtype=torch.float32,
                    tokens_per_micro_batch=self.optimizer.tokens_per_micro_batch,
                    shared_prefixes=self.optimizer.shared_prefixes,
                )
            if self.kind == "fsdp2":
                return fsdp2.fsdp2_backend(head, group, self.optimizer, self.schedule, **options)
            stage = int(self.kind.removeprefix("zero"))
            return zero.zero_backend(head, group, self.optimizer, self.schedule, stage=stage, **options)

    def _head(self):
        model = sharp_model() if self.family is None else model_of(self.family)
        if self.role != "critic":
            return PolicyHead(model, 1.1 if self.role == "reference" else 1.0)
        critic = ValueModel(model)
        torch.nn.init.normal_(critic.head.weight, generator=torch.Generator().manual_seed(1))
        return ValueHead(critic)


def costs(head, setting, device):
    """Stand in for what calls of the model really cost."""
    if setting == "off":
        return None
    assert head.why_not_shared is None
    return CHEAP
