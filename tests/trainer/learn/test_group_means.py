"""A loss that is averaged over groups: which rows belong together, and where an update may be cut."""

import pytest
import torch

from rollgym.trainer.algorithms.presets import resolve_preset
from rollgym.trainer.backends.heads import PolicyHead
from rollgym.trainer.backends.torch_backend import Schedule, TorchBackend
from rollgym.trainer.config.optimizer import OptimizerSettings
from rollgym.trainer.learn.batches import episode_batch, row_builder
from rollgym.trainer.learn.learner import Learner, Models
from rollgym.trainer.learn.prepared import sequences_of
from tests.support.played_groups import sharp_groups
from tests.support.tiny_models import sharp_model


def settings(**parts):
    return resolve_preset("grpo", {"aggregation": {"unit": "group"}, **parts})


def batch(rows):
    return episode_batch(sharp_groups(), row_builder(rows))


@pytest.mark.parametrize("rows", ["step", "trajectory"])
def test_all_rows_of_a_group_are_one_sequence(rows):
    played = batch(rows)
    groups = [played.episodes.groups[row.trajectory] for row in played.rows]
    assert len(set(groups)) > 1
    assert sequences_of(settings(), played) == [(group, 0) for group in groups]


class Watched(TorchBackend):
    """A backend that remembers the rows of each optimizer step."""

    def __init__(self, *given):
        super().__init__(*given)
        self.steps = []

    def step(self, rows, loss, **asked):
        self.steps.append([row.ids.tolist() for row in rows])
        return super().step(rows, loss, **asked)


async def updated(algorithm, played):
    optimizer = OptimizerSettings(tokens_per_micro_batch=60, gradient_clip=1e9)
    policy = Watched(PolicyHead(sharp_model(), 1.0), optimizer, Schedule(1e-3, 0, 10, "constant"))
    await Learner(algorithm, Models(policy, None, None), seed=1).update(played, step=0)
    return policy


@pytest.mark.parametrize("level", ["token", "sequence"])
async def test_a_group_lies_in_one_optimizer_step(level):
    """A ratio of episodes would ask for less."""
    played = batch("step")
    policy = await updated(settings(minibatches=2, ratio={"level": level}), played)
    assert len(policy.steps) == 2
    groups = [played.episodes.groups[row.trajectory] for row in played.rows]
    for ids in policy.steps:
        within = {group for row, group in zip(played.rows, groups, strict=True) if list(row.ids) in ids}
        of_them = [row for row, group in zip(played.rows, groups, strict=True) if group in within]
        assert len(of_them) == len(ids)


async def test_the_layout_of_rows_does_not_change_the_update():
    algorithm = settings(minibatches=2)
    whole, cut = [dict((await updated(algorithm, batch(rows))).export()) for rows in ("trajectory", "step")]
    for name, tensor in whole.items():
        torch.testing.assert_close(cut[name], tensor, atol=2e-5, rtol=2e-3, msg=name)
