"""A small model's part in a rank, which shares prefixes wherever a few tokens are saved; it is sent to the rank."""

from dataclasses import dataclass
from unittest import mock

import torch

from tests.support.tiny_models import sharp_model
from trainer.backends import fsdp2
from trainer.backends.heads import PolicyHead
from trainer.backends.optimizer import Schedule
from trainer.backends.prefix_tree import CallCosts
from trainer.config.run import OptimizerSettings

CHEAP = CallCosts(pair=0.0, masked_pair=0.0, copied=0.0, call=4.0, held=0.05)
"""Small models compute a few tokens at little more than what a call takes: by their own costs nothing is shared."""


@dataclass(frozen=True)
class SharingRecipe:
    """How a rank makes its part."""

    optimizer: OptimizerSettings
    schedule: Schedule
    gradient_checkpointing: bool = False

    def __call__(self, group, backends):
        torch.set_num_threads(1)
        with mock.patch.object(fsdp2, "sharing_costs", costs):
            return fsdp2.fsdp2_backend(
                PolicyHead(sharp_model(), 1.0),
                group,
                self.optimizer,
                self.schedule,
                gradient_checkpointing=self.gradient_checkpointing,
            )


def costs(head, setting, device):
    """Stand in for what calls of the model really cost."""
    if setting == "off":
        return None
    assert head.why_not_shared is None
    return CHEAP
