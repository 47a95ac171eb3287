"""Two ranks train a model as one process does: same losses, gradients and weights, whatever divides it."""

import itertools
from dataclasses import replace
from functools import partial
from importlib.util import find_spec

import pytest
import torch

from rollgym.trainer.algorithms.aggregation import collect, means
from rollgym.trainer.algorithms.presets import PRESETS as EVERY_PRESET
from rollgym.trainer.algorithms.presets import resolve_preset
from rollgym.trainer.backends.base import TrainRow
from rollgym.trainer.backends.heads import PolicyHead
from rollgym.trainer.backends.optimizer import Schedule
from rollgym.trainer.backends.ranked import RankedBackend, Ranks
from rollgym.trainer.backends.torch_backend import TorchBackend
from rollgym.trainer.learn.batches import episode_batch, row_builder
from rollgym.trainer.learn.learner import Learner, Models
from tests.support.forked_ranks import ForkedRanks
from tests.support.megatron_ranks import family_model
from tests.support.rank_recipes import (
    Routed,
    gradient_not_finite_at,
    head_of,
    loss_with_entropy,
    not_finite_at,
    numbered,
    numbers_as_given,
)
from tests.support.sharded_models import (
    DEVICE,
    GRADIENT_RATE,
    KINDS,
    MESHES,
    PRESETS,
    SUPERVISED,
    WIDTH,
    Made,
    assert_equal_losses,
    relative,
    settings_of,
    some_rows,
    trained,
    weights_of,
)
from tests.support.sharing_ranks import SharingRecipe
from tests.trainer.backends.test_shared_prefixes import played_groups as prefix_groups


@pytest.fixture(
    scope="module",
    params=[
        "data",
        pytest.param("tensor", marks=pytest.mark.slow),
        pytest.param("both", marks=pytest.mark.four_processes),
    ],
)
def ranks(request, tmp_path_factory):
    started = Ranks(ForkedRanks(tmp_path_factory.mktemp("ranks")), MESHES[request.param], DEVICE, 120.0)
    started.start()
    yield started
    started.close()


# With a critic, and with a reference; the other pairs take minutes.
QUICK = [("ppo", "fsdp2"), ("grpo", "zero3")]


@pytest.mark.parametrize(
    ("preset", "kind"),
    [
        pytest.param(preset, kind, marks=() if (preset, kind) in QUICK else pytest.mark.slow)
        for preset in PRESETS
        for kind in KINDS
    ],
)
async def test_losses_gradients_and_weights_are_those_of_one_process(ranks, trained_alone, preset, kind):
    if kind != "fsdp2" and ranks.mesh.tensor > 1:
        pytest.skip("DeepSpeed divides over data-parallel ranks only")
    if kind != "fsdp2":
        pytest.importorskip("deepspeed", reason="the extra [deepspeed] is not installed")
    for optimizer, rate, steps, tolerance in (
        (settings_of(kind="sgd"), GRADIENT_RATE, 1, 1e-5),
        (settings_of(kind="sgd"), 0.01, 5, 1e-6),
        (settings_of(epsilon=1e-5), 1e-3, 5, 1e-4),
    ):
        alone = Made(None, kind, optimizer, rate)
        expected, metrics = await trained_alone(alone, preset, optimizer, steps)
        found, ranked_metrics = await trained(Made(ranks, kind, optimizer, rate), preset, steps)
        assert relative(found, expected) < tolerance, (optimizer.kind, rate)
        assert_equal_losses(ranked_metrics[:1], metrics[:1])
        assert metrics[0]["policy/gradient_norm"] > 0


@pytest.mark.parametrize(
    ("loss", "broken"),
    [
        (not_finite_at, "the loss is not finite"),
        (gradient_not_finite_at, "the gradient of model.embed_tokens.weight is not finite"),
    ],
)
def test_what_is_not_finite_in_one_rank_is_named_and_leaves_the_step_out_in_all(ranks, loss, broken):
    makers = [Made(None, "torch", settings_of(epsilon=1e-5), 1e-3)]
    for kind in KINDS if ranks.mesh.tensor == 1 and find_spec("deepspeed") else KINDS[:1]:
        makers.append(Made(ranks, kind, settings_of(epsilon=1e-5), 1e-3))
    for made in makers:
        backend = made.backend("policy")
        before = dict(backend.export())
        report = backend.step(some_rows(), partial(loss, row=2), keep_outputs=True)
        assert (report.applied, report.broken) == (False, broken), made.kind
        assert report.metrics == {}
        assert [len(line) for line in report.outputs] == [len(row.ids) for row in some_rows()]
        assert all(torch.equal(tensor, before[name]) for name, tensor in backend.export())
        assert backend.step(some_rows(), SUPERVISED).applied, "the next one is as if nothing had been"
        assert backend.not_finite() == []


def test_a_weight_that_is_not_finite_in_one_ranks_piece_is_named(ranks):
    backend = Made(ranks, "fsdp2", settings_of(), 1e-3).backend("policy")
    state = backend.state_dict()
    state["model"]["model.norm.weight"][-1] = torch.nan
    backend.load_state_dict(state)
    assert backend.not_finite() == ["model.norm.weight"]


def test_fewer_rows_than_ranks_are_no_reason_to_wait(ranks):
    backend = Made(ranks, "fsdp2", settings_of(), 1e-3).backend("policy")
    assert [len(line) for line in backend.forward(some_rows()[:1])] == [5]
    assert backend.forward([]) == []
    assert backend.step(some_rows()[:1], SUPERVISED).applied


@pytest.mark.parametrize("lengths", [(40, *[13] * 6), (9,)], ids=["fewer", "none"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_without_rows_left_goes_on_with_the_others_where_entropies_are_learned_from(
    ranks, kind, lengths
):
    if kind != "fsdp2":
        pytest.importorskip("deepspeed", reason="the extra [deepspeed] is not installed")
        if ranks.mesh.tensor > 1:
            pytest.skip("ZeRO divides no layers")
    draws = torch.Generator().manual_seed(0)
    rows = [_row(torch.randint(2, 40, (length,), generator=draws), length - 2, draws) for length in lengths]
    optimizer = settings_of(kind="sgd", tokens_per_micro_batch=14)
    found, expected = (
        Made(where, kind, optimizer, GRADIENT_RATE).backend("policy") for where in (ranks, None)
    )
    for backend in (found, expected):
        assert backend.step(rows, loss_with_entropy, entropy="gradient").applied
    assert relative([dict(found.export())], [dict(expected.export())]) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_a_mixtures_experts_are_kept_and_taken_again_as_in_one_process(ranks, kind):
    if ranks.mesh.tensor > 1:
        pytest.skip("experts are not divided by layers")
    if kind != "fsdp2":
        pytest.importorskip("deepspeed", reason="the extra [deepspeed] is not installed")
    settings = settings_of(kind="sgd", tokens_per_micro_batch=30)
    head, schedule = PolicyHead(family_model("qwen3_moe"), 1.0), Schedule(0.1, 0, 1, "constant")
    expected = TorchBackend(head, settings, schedule)
    found = RankedBackend(ranks, "routed", Routed(kind, settings), WIDTH)
    outputs, experts = found.forward_routed(some_rows())
    plain, own = expected.forward_routed(some_rows())
    for one, other in zip([*outputs, *experts], [*plain, *own], strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    others = [replace(row, experts=taken.flip(0)) for row, taken in zip(some_rows(), own, strict=True)]
    again = found.forward(others)
    assert not torch.equal(again[1], outputs[1]), "they were taken"
    for one, other in zip(again, expected.forward(others), strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    for backend in (found, expected):
        backend.step(others, SUPERVISED)
    assert relative([dict(found.export())], [dict(expected.export())]) < 1e-5


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


@pytest.mark.parametrize(
    ("kind", "budget", "checkpointing"),
    [
        ("fsdp2", 10_000, False),
        ("fsdp2", 40, False),
        ("fsdp2", 10_000, True),
        ("zero2", 40, False),
        ("zero3", 40, False),
    ],
)
def test_ranks_share_what_their_rows_begin_with(ranks, kind, budget, checkpointing):
    if kind != "fsdp2":
        pytest.importorskip("deepspeed", reason="the extra [deepspeed] is not installed")
        if ranks.mesh.tensor > 1:
            pytest.skip("ZeRO divides no layers")
    rows = grouped_rows()
    schedule = Schedule(GRADIENT_RATE, 0, 1, "constant")
    apart, shared = (
        settings_of(kind="sgd", tokens_per_micro_batch=budget, shared_prefixes=mode)
        for mode in ("off", "auto")
    )
    alone = TorchBackend(head_of("policy"), apart, schedule)
    recipe = SharingRecipe(kind, shared, schedule, checkpointing)
    together = RankedBackend(ranks, "policy", recipe, 16)
    shares = kind != "zero3"
    assert (together.why_not_shared is None) is shares
    for one, two in zip(together.forward(rows), alone.forward(rows), strict=True):
        torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-5)
    alone.step(rows, weighted)
    tokens = together.step(rows, weighted).tokens
    assert tokens.rows == sum(len(row.ids) for row in rows)
    assert (tokens.computed < 0.9 * tokens.rows) is shares
    assert relative([dict(together.export())], [dict(alone.export())]) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_whole_numbers_come_to_the_loss_as_they_are(ranks, kind):
    if kind != "fsdp2":
        pytest.importorskip("deepspeed", reason="the extra [deepspeed] is not installed")
        if ranks.mesh.tensor > 1:
            pytest.skip("ZeRO divides no layers")
    settings = settings_of(kind="sgd", tokens_per_micro_batch=40, shared_prefixes="auto")
    recipe = SharingRecipe(kind, settings, Schedule(GRADIENT_RATE, 0, 1, "constant"))
    report = RankedBackend(ranks, "policy", recipe, 16).step(numbered(grouped_rows()), numbers_as_given)
    assert (report.tokens.computed < report.tokens.rows) is (kind != "zero3")
    assert means(report.metrics) == {"as_given": 1.0}


FAMILIES = ("qwen3", "llama-3", "gemma-2")


def shared_and_apart(ranks, kind, family, role="policy", budget=10_000):
    """The same part of a model twice, with shared prefixes and without."""
    schedule = Schedule(GRADIENT_RATE, 0, 1, "constant")
    for mode in ("auto", "off"):
        settings = settings_of(kind="sgd", tokens_per_micro_batch=budget, shared_prefixes=mode)
        recipe = SharingRecipe(kind, settings, schedule, family=family, role=role)
        yield RankedBackend(ranks, f"{role}-{mode}", recipe, 16)


only_data = pytest.mark.parametrize("ranks", ["data"], indirect=True)
"""Where it is the same for every mesh, or heads are too few to be divided."""


@only_data
@pytest.mark.parametrize("family", FAMILIES)
def test_families_gradients_are_those_without_in_ranks(ranks, family):
    for kind in ["fsdp2", "zero1", "zero2"] if find_spec("deepspeed") else ["fsdp2"]:
        together, apart = shared_and_apart(ranks, kind, family)
        tokens = together.step(grouped_rows(), weighted).tokens
        assert tokens.computed < 0.9 * tokens.rows
        apart.step(grouped_rows(), weighted)
        assert relative([dict(together.export())], [dict(apart.export())]) < 1e-6, kind


@only_data
@pytest.mark.parametrize(
    ("preset", "family"),
    [
        pytest.param(preset, family, marks=() if preset in dict(QUICK) else pytest.mark.slow)
        for preset, family in zip(sorted(EVERY_PRESET), itertools.cycle(FAMILIES), strict=False)
    ],
)
async def test_every_presets_gradients_are_those_without_in_ranks(ranks, preset, family):
    settings = resolve_preset(preset, {"minibatches": 1, "epochs": 1})
    policies, critics, references = (
        list(shared_and_apart(ranks, "fsdp2", family, role)) if wanted else [None, None]
        for role, wanted in (
            ("policy", True),
            ("critic", settings.critic is not None),
            ("reference", settings.needs_reference),
        )
    )
    found, saved = [], []
    for policy, critic, reference in zip(policies, critics, references, strict=True):
        models = Models(policy, critic, reference)
        metrics = await Learner(settings, models, seed=0).update(
            episode_batch(prefix_groups(), row_builder("step")), 0
        )
        found.append(weights_of(models))
        saved.append(metrics["policy/shared_prefixes"])
    assert relative(found[0], found[1]) < 1e-6
    assert saved[0] > 0.4
    assert saved[1] == 0.0
