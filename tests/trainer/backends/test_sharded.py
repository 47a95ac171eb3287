"""Two ranks train a model as one process does: same losses, gradients and weights, whatever divides it."""

import math

import pytest

from tests.support.played_groups import played_groups
from tests.support.rank_recipes import Recipe, head_of
from tests.support.tiny_models import sharp_model
from trainer.algorithms.presets import resolve_preset
from trainer.backends.local_ranks import LocalRanks
from trainer.backends.optimizer import Schedule
from trainer.backends.rank_group import MeshShape
from trainer.backends.ranked import RankedBackend, Ranks
from trainer.backends.reference import FrozenModel
from trainer.backends.torch_backend import TorchBackend
from trainer.config.run import OptimizerSettings
from trainer.learn.batches import episode_batch
from trainer.learn.learner import Learner, Models
from trainer.learn.rows import row_builder

WIDTH = 16
TOKENS = 120
GRADIENT_RATE = 2.0**10
"""At such a rate a step is much larger than the weights, which then are the gradient, as exact as it is itself."""

PRESETS = {
    "ppo": resolve_preset("ppo", {"minibatches": 1, "epochs": 1}),
    "grpo": resolve_preset("grpo", {"minibatches": 1, "epochs": 1, "kl": {"coefficient": 0.05}}),
    "gigpo": resolve_preset("gigpo", {"minibatches": 1, "epochs": 1}),
}
MESHES = {"data": MeshShape(data=2), "tensor": MeshShape(tensor=2)}


@pytest.fixture(scope="module", params=list(MESHES))
def ranks(request, tmp_path_factory):
    started = Ranks(LocalRanks(tmp_path_factory.mktemp("ranks")), MESHES[request.param], "cpu", 120.0)
    started.start()
    yield started
    started.close()


def settings_of(**changes) -> OptimizerSettings:
    return OptimizerSettings(tokens_per_micro_batch=TOKENS, **{"gradient_clip": 1e9, **changes})


class Made:
    """Models that learn the same, here and in ranks.

    Args:
        ranks: The ranks; None for models in this process.
        kind: What divides them.
    """

    def __init__(self, ranks, kind, optimizer, rate, **options):
        self._ranks, self._kind, self._optimizer, self._rate = ranks, kind, optimizer, rate
        self._options = options

    def backend(self, role):
        if self._ranks is not None:
            recipe = Recipe(self._kind, role, self._optimizer, self._rate, self._options)
            return RankedBackend(self._ranks, role, recipe, WIDTH)
        if role == "reference":
            return FrozenModel(head_of(role), TOKENS)
        schedule = Schedule(self._rate, 0, 1, "constant")
        return TorchBackend(head_of(role), self._optimizer, schedule, **self._options)

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


def assert_equal_losses(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for name, value in other.items():
            assert one[name] == pytest.approx(value, rel=1e-5, abs=2e-6), name


@pytest.mark.parametrize("preset", PRESETS)
async def test_losses_gradients_and_weights_are_those_of_one_process(ranks, preset):
    kind = "fsdp2"
    for optimizer, rate, steps, tolerance in (
        (settings_of(kind="sgd"), GRADIENT_RATE, 1, 1e-5),
        (settings_of(kind="sgd"), 0.01, 5, 1e-6),
        (settings_of(epsilon=1e-5), 1e-3, 5, 1e-4),
    ):
        expected, metrics = await trained(Made(None, kind, optimizer, rate), preset, steps)
        found, ranked_metrics = await trained(Made(ranks, kind, optimizer, rate), preset, steps)
        assert relative(found, expected) < tolerance, (optimizer.kind, rate)
        assert_equal_losses(ranked_metrics[:1], metrics[:1])
        assert metrics[0]["policy/gradient_norm"] > 0
