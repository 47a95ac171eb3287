"""Two ranks train a model as one process does: same losses, gradients and weights, whatever divides it."""

import math

import pytest
import torch

from tests.support.played_groups import played_groups
from tests.support.rank_recipes import Recipe, head_of
from tests.support.sharing_ranks import SharingRecipe
from tests.support.tiny_models import sharp_model
from trainer.algorithms.metrics import collect
from trainer.algorithms.presets import resolve_preset
from trainer.backends.base import TrainRow
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
    return OptimizerSettings(**{"tokens_per_micro_batch": TOKENS, "gradient_clip": 1e9, **changes})


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
            if name.endswith("/shared_prefixes"):
                continue  # each rank shares what its own rows begin with
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


# Shared prefixes


def grouped_rows() -> list[TrainRow]:
    """A group of long episodes, its turns as rows, and a few rows that share nothing: ranks have unlike trees."""
    draws = torch.Generator().manual_seed(0)

    def tokens(count):
        return torch.randint(2, 40, (count,), generator=draws)

    rows, prompt = [], tokens(12)
    for _ in range(3):
        episode = prompt
        for _ in range(2):
            episode = torch.cat([episode, tokens(7)])
            rows.append(_row(episode, 4, draws))
            episode = torch.cat([episode[:-1], tokens(1)])  # its past is rewritten
    return [*rows, *(_row(tokens(count), 3, draws) for count in (9, 14, 5))]


def _row(ids, wanted, draws):
    mask = torch.arange(len(ids)) >= len(ids) - wanted
    return TrainRow(ids, mask, {"weight": torch.randn(len(ids), generator=draws)})


def weighted(micro):
    loss = (micro.outputs * micro.fields["weight"] * micro.mask).sum() / 20
    return loss, collect({"loss": (loss.detach(), torch.ones(()))})


@pytest.mark.parametrize(("budget", "checkpointing"), [(10_000, False), (40, False), (10_000, True)])
def test_ranks_share_what_their_rows_begin_with(ranks, budget, checkpointing):
    rows = grouped_rows()
    schedule = Schedule(GRADIENT_RATE, 0, 1, "constant")
    apart, shared = (
        settings_of(kind="sgd", tokens_per_micro_batch=budget, shared_prefixes=mode)
        for mode in ("off", "auto")
    )
    alone = TorchBackend(head_of("policy"), apart, schedule)
    recipe = SharingRecipe(shared, schedule, checkpointing)
    together = RankedBackend(ranks, "policy", recipe, 16)
    assert together.why_not_shared is None
    for one, two in zip(together.forward(rows), alone.forward(rows), strict=True):
        torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-5)
    alone.step(rows, weighted)
    tokens = together.step(rows, weighted).tokens
    assert tokens.rows == sum(len(row.ids) for row in rows)
    assert tokens.computed < 0.9 * tokens.rows
    assert relative([dict(together.export())], [dict(alone.export())]) < 1e-5
