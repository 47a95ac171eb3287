"""Two ranks with Megatron-Core train a model as one process does, whatever of it they divide.

On a machine without GPUs its own code runs on the processor (`tests.support.cuda_on_cpu`), the optimizer too.
"""

import copy
import hashlib
from dataclasses import replace
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM

from rollgym.trainer.algorithms.aggregation import collect, means
from rollgym.trainer.backends.megatron.layout import groups
from rollgym.trainer.backends.optimizer import Schedule
from rollgym.trainer.backends.rank_group import MeshShape
from rollgym.trainer.backends.torch_backend import TorchBackend
from tests.support.megatron_models import CONTEXT, DATA, MESHES, STAGES, TENSOR, Made, needs_megatron
from tests.support.megatron_ranks import family_head, generated, vocabulary
from tests.support.rank_recipes import (
    gradient_not_finite_at,
    not_finite_at,
    numbered,
    numbers_as_given,
)
from tests.support.sharded_models import (
    GRADIENT_RATE,
    SUPERVISED,
    assert_equal_losses,
    relative,
    settings_of,
    some_rows,
    trained,
)

pytestmark = pytest.mark.slow


def asked(ranks, make, method, *arguments):
    ranks.everywhere("build", "probe", make)
    return ranks.everywhere("ask", "probe", method, *arguments)


# Log-probabilities of a divided vocabulary


@pytest.mark.parametrize("entropy", ["none", "metric", "gradient", "collision"])
@pytest.mark.parametrize(("scale", "cut"), [(1.0, 4), (60.0, 4), (1.0, 7), (1.0, 1)])
def test_a_divided_vocabulary_has_the_dense_values_and_gradients(ranks, entropy, scale, cut):
    draws = torch.Generator().manual_seed(3)
    logits = torch.randn(6, 7, generator=draws, dtype=torch.float64) * scale
    logits[1, 0], logits[2, 6] = -torch.inf, 1000.0
    targets = torch.tensor([0, 3, 6, 4, 1, 6])
    weights = torch.randn(2, 6, generator=draws)
    answers = asked(ranks, vocabulary, "read", logits.float(), targets, cut, entropy, weights)

    dense = logits.requires_grad_()
    logp = dense.log_softmax(dim=-1)
    chosen = logp.gather(-1, targets[:, None])[:, 0]
    spread = -(logp.exp() * logp.masked_fill(logp == -torch.inf, 0.0)).sum(dim=-1)
    if entropy == "collision":
        spread = -(2 * logp).logsumexp(dim=-1)
    loss = (chosen * weights[0]).sum() + (spread * weights[1]).sum() * (entropy == "gradient")
    loss.backward()
    for found, entropies, _ in answers:
        torch.testing.assert_close(found.double(), chosen.detach(), atol=1e-5, rtol=1e-5)
        assert (entropies is None) == (entropy == "none")
        if entropies is not None:
            torch.testing.assert_close(entropies.double(), spread.detach(), atol=1e-5, rtol=1e-5)
    gradient = torch.cat([each[2] for each in answers], dim=1).double()
    assert not gradient.isnan().any()
    torch.testing.assert_close(gradient, dense.grad.nan_to_num(), atol=1e-5, rtol=1e-5)


# Who is where


@needs_megatron
def test_groups_are_those_that_megatron_makes(ranks):
    meshes = [
        MeshShape(data=4, tensor=2, pipeline=2),
        MeshShape(data=2, tensor=2, pipeline=2, context=2),
        MeshShape(data=4, tensor=2, pipeline=2, expert=2),
        MeshShape(data=2, tensor=2, context=2, expert=2),
        MeshShape(data=8, expert=8),
        MeshShape(data=8, tensor=4, pipeline=2, expert=4),
        MeshShape(tensor=2, pipeline=4, context=2),
    ]
    for mesh, found in zip(meshes, asked(ranks, generated, "generated", meshes)[0], strict=True):
        for dimension, theirs in found.items():
            assert sorted(groups(mesh, dimension)) == sorted(theirs), (mesh, dimension)
    for mesh in MESHES.values():
        for rank, found in enumerate(asked(ranks, generated, "joined", mesh)):
            for dimension, theirs in found.items():
                assert theirs in groups(mesh, dimension), (mesh, dimension)
                assert rank in theirs


# One loss


@needs_megatron
@pytest.mark.parametrize(
    ("preset", "mesh"),
    [
        ("ppo", "tensor"),
        ("grpo", "tensor"),
        ("gigpo", "tensor"),
        ("ppo", "stages"),
        ("grpo", "context"),
        ("ppo", "data"),
    ],
)
async def test_losses_gradients_and_weights_are_those_of_one_process(ranks, trained_alone, preset, mesh):
    for optimizer, rate, steps, tolerance in (
        (settings_of(kind="sgd"), GRADIENT_RATE, 1, 1e-5),
        (settings_of(kind="sgd"), 0.01, 5, 1e-6),
        (settings_of(epsilon=1e-5), 1e-3, 5, 1e-4),
    ):
        alone = Made(None, None, optimizer, rate)
        expected, metrics = await trained_alone(alone, preset, optimizer, steps)
        found, ranked_metrics = await trained(Made(ranks, MESHES[mesh], optimizer, rate), preset, steps)
        assert relative(found, expected) < tolerance, (optimizer.kind, rate)
        assert_equal_losses(ranked_metrics[:1], metrics[:1])
        assert metrics[0]["policy/gradient_norm"] > 0


def weighted(micro):
    """A loss with gradient through log-probabilities and entropies alike, each row with a weight of its own."""
    weights = torch.cos(micro.rows.float() + 1.0)[:, None]
    kept = (micro.outputs * weights + 0.3 * micro.entropy * weights.square()) * micro.mask
    loss = kept.sum() / 20
    return loss, collect({"loss": (loss.detach(), torch.ones(()))})


def compared(ranks, mesh, family="qwen3", **options):
    """A gradient and two steps with a clip, and what is computed before them, in ranks and here."""
    for optimizer, rate, steps in (
        (settings_of(kind="sgd"), GRADIENT_RATE, 1),
        (settings_of(epsilon=1e-5, gradient_clip=0.5), 1e-3, 2),
    ):
        found, expected = (
            Made(where, mesh, optimizer, rate, family, **options).backend("policy") for where in (ranks, None)
        )
        for _ in range(steps):
            one = found.step(some_rows(), weighted, entropy="gradient", keep_outputs=True)
            other = expected.step(some_rows(), weighted, entropy="gradient", keep_outputs=True)
            assert one.gradient_norm == pytest.approx(other.gradient_norm, rel=1e-4)
        yield optimizer, found, expected, one, other


@needs_megatron
@pytest.mark.parametrize(
    ("family", "mesh", "options"),
    [
        ("qwen2", "tensor", {}),
        ("llama", "tensor", {"sequence_parallel": False}),
        ("qwen2", "stages", {}),
        ("llama", "context", {"gradient_checkpointing": True}),
        ("qwen3_moe", "experts", {}),
        ("qwen3_moe", "tensor", {"gradient_checkpointing": True}),
        ("qwen3_moe", "stages", {"gradient_checkpointing": True}),
        ("qwen3_moe", "context", {}),
    ],
)
def test_every_family_learns_as_in_one_process(ranks, family, mesh, options):
    for optimizer, found, expected, one, other in compared(ranks, MESHES[mesh], family, **options):
        for line, plain in zip(one.outputs, other.outputs, strict=True):
            torch.testing.assert_close(line, plain, atol=1e-4, rtol=1e-4)
        assert relative([dict(found.export())], [dict(expected.export())]) < 1e-5
        if optimizer.kind == "adamw":  # the other step leaves weights that are the gradient, and large
            for line, plain in zip(found.forward(some_rows()), expected.forward(some_rows()), strict=True):
                torch.testing.assert_close(line, plain, atol=1e-3, rtol=1e-3)


@needs_megatron
def test_weights_in_fewer_bits_are_trained_in_float32(ranks):
    optimizer = settings_of(epsilon=1e-5)
    found, expected = (
        Made(where, TENSOR, optimizer, 1e-3, dtype=torch.bfloat16).backend("policy")
        for where in (ranks, None)
    )
    for _ in range(3):
        found.step(some_rows(), SUPERVISED)
        expected.step(some_rows(), SUPERVISED)
    exported = dict(found.export())
    assert {tensor.dtype for tensor in exported.values()} == {torch.bfloat16}
    assert relative([exported], [dict(expected.export())]) < 2e-2
    masters = found.state_dict()["model"]
    assert {tensor.dtype for tensor in masters.values()} == {torch.float32}
    rounded = {name: tensor.bfloat16() for name, tensor in masters.items()}
    assert all(torch.equal(rounded[name], tensor) for name, tensor in found.parameters())


def routed_rows(seed=5):
    """Rows whose experts were recorded, not those that the router would choose; of some tokens none were."""
    draws = torch.Generator().manual_seed(seed)
    rows = []
    for number, row in enumerate(some_rows()):
        scores = torch.rand(len(row.ids), 2, 4, generator=draws)
        experts = scores.topk(2, dim=-1).indices.to(torch.int16)
        experts[::4] = -1
        rows.append(replace(row, experts=None if number == 3 else experts.flatten(1)))
    return rows


@needs_megatron
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("tensor", {}),
        ("experts", {}),
        ("context", {"gradient_checkpointing": True}),
        ("stages", {"gradient_checkpointing": True}),
    ],
)
def test_recorded_experts_are_taken_again(ranks, mesh, options):
    kwargs = {**options}
    settings = settings_of(kind="sgd", tokens_per_micro_batch=30)
    found, expected = (
        Made(where, MESHES[mesh], settings, GRADIENT_RATE, "qwen3_moe", **kwargs).backend("policy")
        for where in (ranks, None)
    )
    free = found.forward(some_rows())
    for line, plain, other in zip(
        found.forward(routed_rows()), expected.forward(routed_rows()), free, strict=True
    ):
        torch.testing.assert_close(line, plain, atol=1e-4, rtol=1e-4)
        assert len(line) < 4 or len(line) == 7 or not torch.equal(line, other)
    for line, other in zip(found.forward(some_rows()), free, strict=True):
        torch.testing.assert_close(line, other, msg="the routers choose again")
    kept, own = found.forward_routed(routed_rows()), expected.forward_routed(routed_rows())
    for row, one, other in zip(routed_rows(), kept.experts, own.experts, strict=True):
        assert one.tolist() == other.tolist()
        if row.experts is not None:
            known = row.experts >= 0
            assert torch.equal(one[known], row.experts[known])
    for line, other in zip(kept.outputs, own.outputs, strict=True):
        torch.testing.assert_close(line, other, atol=1e-4, rtol=1e-4)
    for backend in (found, expected):
        backend.step(routed_rows(), weighted, entropy="gradient")
    exported = dict(found.export())
    assert relative([exported], [dict(expected.export())]) < 1e-5


# What leaves the ranks, and comes back


@needs_megatron
@pytest.mark.parametrize(
    ("family", "mesh"),
    [
        ("qwen3", "tensor"),
        ("qwen3", "stages"),
        ("qwen3_moe", "tensor"),
        ("qwen3_moe", "stages"),
        ("qwen3_moe", "experts"),
    ],
)
def test_weights_come_back_bit_by_bit(ranks, family, mesh, tmp_path):
    backend = Made(ranks, MESHES[mesh], settings_of(), 1e-3, family).backend("policy")
    source = TorchBackend(family_head(family, "policy"), settings_of(), Schedule(1e-3, 0, 1, "constant"))
    exported, expected = list(backend.export()), dict(source.export())
    assert len(exported) == len(expected), "tied weights once"
    assert all(torch.equal(tensor, expected[name]) for name, tensor in exported)
    assert [name for name, _ in backend.export()] == [name for name, _ in exported]
    digests = [hashlib.blake2b() for _ in range(3)]
    backend.digest(digests[0])
    backend.step(some_rows(), SUPERVISED)
    backend.digest(digests[1])
    backend.digest(digests[2])
    assert digests[0].digest() != digests[1].digest() == digests[2].digest()
    backend.save(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    own = dict(loaded.named_parameters())
    assert all(torch.equal(own[name], tensor) for name, tensor in backend.parameters())


@needs_megatron
@pytest.mark.parametrize(
    ("family", "mesh"), [("qwen3", "tensor"), ("qwen3_moe", "experts"), ("qwen2", "stages")]
)
@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_a_checkpoint_is_one_processs_and_the_reverse(ranks, family, mesh, kind):
    optimizer = settings_of(kind=kind, epsilon=1e-5) if kind == "adamw" else settings_of(kind=kind)
    made = [Made(where, MESHES[mesh], optimizer, 1e-3, family) for where in (ranks, None)]
    saver = made[0].backend("policy")
    for _ in range(2):
        saver.step(some_rows(), SUPERVISED)
    state = saver.state_dict()
    saver.step(some_rows(), SUPERVISED)
    expected = dict(saver.export())
    alone = made[1].backend("policy")
    alone.load_state_dict(copy.deepcopy(state))
    back = copy.deepcopy(alone.state_dict())
    for name, resumed in (("alone", alone), ("again", made[0].backend("policy"))):
        if name == "again":
            resumed.load_state_dict(back)
        resumed.step(some_rows(), SUPERVISED)
        assert relative([dict(resumed.export())], [expected]) < 1e-6, name


@needs_megatron
@pytest.mark.parametrize("mesh", ["tensor", "stages", "data"])
@pytest.mark.parametrize(
    ("loss", "broken"),
    [
        (not_finite_at, "the loss is not finite"),
        (gradient_not_finite_at, "the gradient of model.embed_tokens.weight is not finite"),
    ],
)
def test_what_is_not_finite_is_named_and_leaves_the_step_out(ranks, mesh, loss, broken):
    backend = Made(ranks, MESHES[mesh], settings_of(epsilon=1e-5), 1e-3).backend("policy")
    before = dict(backend.export())
    report = backend.step(some_rows(), partial(loss, row=2), keep_outputs=True)
    assert (report.applied, report.broken) == (False, broken)
    assert report.metrics == {}
    assert [len(line) for line in report.outputs] == [len(row.ids) for row in some_rows()]
    assert all(torch.equal(tensor, before[name]) for name, tensor in backend.export())
    assert backend.step(some_rows(), SUPERVISED).applied, "the next one is as if nothing had been"
    assert backend.not_finite() == []


@needs_megatron
@pytest.mark.parametrize("mesh", ["tensor", "data", "stages", "context"])
def test_whole_numbers_come_to_the_loss_as_they_are(ranks, mesh):
    backend = Made(ranks, MESHES[mesh], settings_of(kind="sgd"), 1e-3).backend("policy")
    assert means(backend.step(numbered(some_rows()), numbers_as_given).metrics) == {"as_given": 1.0}


@needs_megatron
def test_fewer_rows_than_ranks_are_no_reason_to_wait(ranks):
    for mesh in (DATA, CONTEXT, STAGES):
        backend = Made(ranks, mesh, settings_of(), 1e-3).backend("policy")
        assert [len(line) for line in backend.forward(some_rows()[:1])] == [5]
        assert backend.forward([]) == []
        assert backend.step(some_rows()[:1], SUPERVISED).applied


@needs_megatron
def test_offloaded_models_go_on_where_they_were(ranks):
    backend = Made(ranks, TENSOR, settings_of(epsilon=1e-5), 1e-3).backend("policy")
    backend.step(some_rows(), SUPERVISED)
    before = dict(backend.export())
    backend.offload(["parameters", "gradients", "optimizer"])
    backend.onload(["parameters", "gradients", "optimizer"])
    assert all(torch.equal(tensor, before[name]) for name, tensor in backend.export())
    assert backend.step(some_rows(), SUPERVISED).applied
