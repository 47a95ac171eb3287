"""Small models that learn the same in one process and divided over ranks, and how far apart they end."""

import math
from functools import partial

import pytest
import torch

from rollgym.trainer.algorithms.aggregation import Denominators
from rollgym.trainer.algorithms.presets import resolve_preset
from rollgym.trainer.backends.base import TrainRow
from rollgym.trainer.backends.forward_pass import ForwardPass
from rollgym.trainer.backends.optimizer import Schedule
from rollgym.trainer.backends.rank_group import MeshShape
from rollgym.trainer.backends.ranked import RankedBackend
from rollgym.trainer.backends.reference import FrozenModel
from rollgym.trainer.backends.torch_backend import TorchBackend
from rollgym.trainer.config.optimizer import OptimizerSettings
from rollgym.trainer.learn.batches import episode_batch, row_builder
from rollgym.trainer.learn.learner import Learner, Models
from rollgym.trainer.learn.pipelines.sft import _negative_log_likelihood
from tests.support.played_groups import played_groups
from tests.support.rank_recipes import Recipe, head_of
from tests.support.tiny_models import sharp_model

WIDTH = 16
TOKENS = 120
GRADIENT_RATE = 2.0**10
"""At such a rate a step is much larger than the weights, which then are the gradient, as exact as it is itself."""

DEVICE = "auto" if torch.accelerator.device_count() >= 2 else "cpu"
"""Where there are accelerators for two ranks, they compute, and are compared with the processor."""

PRESETS = {
    "ppo": resolve_preset("ppo", {"minibatches": 1, "epochs": 1}),
    "grpo": resolve_preset("grpo", {"minibatches": 1, "epochs": 1, "kl": {"coefficient": 0.05}}),
    "gigpo": resolve_preset("gigpo", {"minibatches": 1, "epochs": 1}),
}
MESHES = {"data": MeshShape(data=2), "tensor": MeshShape(tensor=2), "both": MeshShape(data=2, tensor=2)}


def settings_of(**changes) -> OptimizerSettings:
    return OptimizerSettings(**{"tokens_per_micro_batch": TOKENS, "gradient_clip": 1e9, **changes})


class Made:
    """Models that learn the same, here and in ranks.

    Args:
        ranks: The ranks; None for models in this process.
        kind: What divides them.
        in_pieces: Whether the ranks write checkpoints themselves.
    """

    def __init__(self, ranks, kind, optimizer, rate, *, in_pieces=False, **options):
        self._in_pieces = in_pieces
        self._ranks, self.kind, self._optimizer, self._rate = ranks, kind, optimizer, rate
        self._options = options

    def backend(self, role):
        if self._ranks is not None:
            recipe = Recipe(self.kind, role, self._optimizer, self._rate, self._options)
            return RankedBackend(self._ranks, role, recipe, WIDTH, in_pieces=self._in_pieces)
        if role == "reference":
            return FrozenModel(ForwardPass(head_of(role), TOKENS))
        schedule = Schedule(self._rate, 0, 1, "constant")
        options = {name: value for name, value in self._options.items() if name != "cpu_offload"}
        return TorchBackend(head_of(role), self._optimizer, schedule, **options)

    def models(self, settings):
        critic = self.backend("critic") if settings.critic is not None else None
        reference = self.backend("reference") if settings.needs_reference else None
        return Models(self.backend("policy"), critic, reference)


def weights_of(models):
    trained = [models.policy] if models.critic is None else [models.policy, models.critic]
    return [dict(model.export()) for model in trained]


def relative(found, expected):
    """The distance of all weights (or gradients) taken together, relative to the expected ones' length."""
    assert [list(each) for each in found] == [list(each) for each in expected]
    pairs = [
        (one[name].double(), other[name].double())
        for one, other in zip(found, expected, strict=True)
        for name in one
    ]
    apart = sum(float((one - other).square().sum()) for one, other in pairs)
    return math.sqrt(apart / sum(float(other.square().sum()) for _, other in pairs))


async def trained(made, preset, steps):
    settings = PRESETS[preset]
    models = made.models(settings)
    learner = Learner(settings, models, seed=1)
    metrics = []
    for step in range(steps):
        batch = episode_batch(played_groups(sharp_model()), row_builder("step"))
        metrics.append(await learner.update(batch, step))
    return weights_of(models), metrics


def assert_equal_losses(found, expected, rel=1e-5):
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for name, value in other.items():
            if name.endswith("/shared_prefixes"):
                continue  # each rank shares what its own rows begin with
            assert one[name] == pytest.approx(value, rel=rel, abs=2e-6), name


KINDS = ["fsdp2", "zero1", "zero2", "zero3"]


SUPERVISED = partial(_negative_log_likelihood, counts=Denominators(tokens=40, rows=8))


def some_rows():
    draws = torch.Generator().manual_seed(1)
    rows = []
    for length in (5, 9, 12, 7, 11, 3, 3, 2):
        mask = torch.zeros(length, dtype=torch.bool)
        mask[length // 2 :] = True
        rows.append(TrainRow(torch.randint(2, 40, (length,), generator=draws), mask))
    return rows
