"""Rows with recorded experts, and the routers that they go to."""

import torch

from rollgym.trainer.backends.base import TrainRow

LAYERS, EXPERTS, TAKEN = 2, 4, 2


def rows():
    draws = torch.Generator().manual_seed(2)
    made = []
    for length in (6, 9, 4):
        mask = torch.arange(length) >= 2
        experts = torch.rand(length, LAYERS, EXPERTS, generator=draws).topk(TAKEN, dim=-1).indices
        made.append(
            TrainRow(
                torch.randint(2, 39, (length,), generator=draws),
                mask,
                experts=experts.flatten(1).to(torch.int16),
            )
        )
    return made


def routers(model):
    return [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
