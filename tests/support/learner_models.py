"""Models and groups for whole updates of a learner."""

import torch

from rollgym.trainer.backends.heads import PolicyHead, ValueHead
from rollgym.trainer.backends.torch_backend import Schedule, TorchBackend
from rollgym.trainer.config.optimizer import OptimizerSettings
from rollgym.trainer.learn.batches import episode_batch, row_builder
from rollgym.trainer.learn.learner import Learner, Models
from rollgym.trainer.models.value_head import ValueModel
from tests.support.played_groups import sharp_groups, with_all_that_presets_read
from tests.support.tiny_models import sharp_model

SCHEDULE = Schedule(1e-3, 0, 10, "constant")


def models_of(settings, budget=10_000, backend=TorchBackend) -> Models:
    optimizer = OptimizerSettings(tokens_per_micro_batch=budget, gradient_clip=1e9)

    def policy():
        return backend(PolicyHead(sharp_model(), 1.0), optimizer, SCHEDULE)

    critic = None
    if settings.critic is not None:
        critic = backend(ValueHead(ValueModel(sharp_model())), optimizer, SCHEDULE)
    return Models(policy(), critic, policy() if settings.needs_reference else None)


def groups_for_all():
    return with_all_that_presets_read(sharp_groups())


async def updated(settings, rows: str, budget=10_000, backend=TorchBackend):
    models = models_of(settings, budget, backend)
    batch = episode_batch(groups_for_all(), row_builder(rows))
    metrics = await Learner(settings, models, seed=1).update(batch, step=0)
    return dict(models.policy.export()), metrics


def assert_equal_weights(first, second):
    for name, tensor in first.items():
        torch.testing.assert_close(second[name], tensor, atol=2e-5, rtol=2e-3, msg=name)
