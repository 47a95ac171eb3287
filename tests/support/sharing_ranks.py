"""A small model's part in a rank, which shares prefixes wherever a few tokens are saved; it is sent to the rank."""

from dataclasses import dataclass
from unittest import mock

import torch

from tests.support.tiny_models import sharp_model
from trainer.backends import fsdp2, zero
from trainer.backends.heads import PolicyHead
from trainer.backends.optimizer import Schedule
from trainer.backends.prefix_tree import CallCosts
from trainer.config.optimizer import OptimizerSettings

CHEAP = CallCosts(pair=0.0, masked_pair=0.0, copied=0.0, call=4.0, held=0.05)
"""Small models compute a few tokens at little more than what a call takes: by their own costs nothing is shared."""


@dataclass(frozen=True)
class SharingRecipe:
    """How a rank makes its part.

    Attributes:
        kind: What divides it.
    """

    kind: str
    optimizer: OptimizerSettings
    schedule: Schedule
    gradient_checkpointing: bool = False

    def __call__(self, group, backends):
        torch.set_num_threads(1)
        head, options = (
            PolicyHead(sharp_model(), 1.0),
            {"gradient_checkpointing": self.gradient_checkpointing},
        )
        with (
            mock.patch.object(fsdp2, "sharing_costs", costs),
            mock.patch.object(zero, "sharing_costs", costs),
        ):
            if self.kind == "fsdp2":
                return fsdp2.fsdp2_backend(head, group, self.optimizer, self.schedule, **options)
            stage = int(self.kind.removeprefix("zero"))
            return zero.zero_backend(head, group, self.optimizer, self.schedule, stage=stage, **options)


def costs(head, setting, device):
    """Stand in for what calls of the model really cost."""
    if setting == "off":
        return None
    assert head.why_not_shared is None
    return CHEAP
