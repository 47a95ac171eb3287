"""Two ranks that divide a model's weights share prefixes, each those of its rows, as one process that does not."""

import pytest
import torch

from tests.support.sharing_ranks import SharingRecipe
from tests.support.tiny_models import sharp_model
from trainer.algorithms.metrics import collect
from trainer.backends.base import TrainRow
from trainer.backends.heads import PolicyHead
from trainer.backends.local_ranks import LocalRanks
from trainer.backends.optimizer import Schedule
from trainer.backends.rank_group import MeshShape
from trainer.backends.ranked import RankedBackend, Ranks
from trainer.backends.torch_backend import TorchBackend
from trainer.config.run import OptimizerSettings

GRADIENT = Schedule(2.0**10, 0, 1, "constant")
"""At such a rate a step is much larger than the weights, which then are the gradient, as exact as it is itself."""


@pytest.fixture(scope="module", params=[MeshShape(data=2), MeshShape(tensor=2)], ids=["data", "tensor"])
def ranks(request, tmp_path_factory):
    started = Ranks(LocalRanks(tmp_path_factory.mktemp("ranks")), request.param, "cpu", 120.0)
    started.start()
    yield started
    started.close()


def settings_of(mode, budget) -> OptimizerSettings:
    return OptimizerSettings(
        kind="sgd", gradient_clip=1e9, shared_prefixes=mode, tokens_per_micro_batch=budget
    )


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
    alone = TorchBackend(PolicyHead(sharp_model(), 1.0), settings_of("off", budget), GRADIENT)
    recipe = SharingRecipe(settings_of("auto", budget), GRADIENT, checkpointing)
    together = RankedBackend(ranks, "policy", recipe, 16)
    assert together.why_not_shared is None
    for one, two in zip(together.forward(rows), alone.forward(rows), strict=True):
        torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-5)
    alone.step(rows, weighted)
    tokens = together.step(rows, weighted).tokens
    assert tokens.rows == sum(len(row.ids) for row in rows)
    assert tokens.computed < 0.9 * tokens.rows
    expected, found = dict(alone.export()), dict(together.export())
    apart = sum(float((found[name] - expected[name]).square().sum()) for name in expected)
    assert apart**0.5 < 1e-6 * sum(float(each.square().sum()) for each in expected.values()) ** 0.5
