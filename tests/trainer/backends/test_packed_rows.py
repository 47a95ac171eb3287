"""Rows that are computed behind each other, without padding, give the outputs and gradients that they give apart."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from rollgym.trainer.backends import packing
from rollgym.trainer.backends.base import TrainRow
from rollgym.trainer.backends.batching import packed_buckets
from rollgym.trainer.backends.forward_pass import ForwardPass
from rollgym.trainer.backends.heads import PolicyHead, ValueHead
from rollgym.trainer.backends.torch_backend import TorchBackend
from rollgym.trainer.config.optimizer import OptimizerSettings
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.models.load import set_attention
from rollgym.trainer.models.packed_attention import PackedRows, attention_forward, name_of_kernel
from rollgym.trainer.models.value_head import ValueModel
from tests.support.current_families import FAMILIES, model_of
from tests.support.sharing_ranks import CHEAP
from tests.support.tiny_models import sharp_model
from tests.trainer.backends.test_kernels import ACCELERATOR, PROCESSOR, on_an_accelerator
from tests.trainer.backends.test_shared_prefixes import COSTS, EXACT, SCHEDULE, error, tree_rows, weighted

CAPPED = ("gemma-2",)
"""Families whose attention is more than products of queries and keys."""
PACKED = [family for family in FAMILIES if family not in CAPPED]


def gradients(head, rows, *, budget, costs=None, packs):
    """The gradient of a batch, its outputs by row, and its micro-batches."""
    head.zero_grad(set_to_none=True)
    forward = ForwardPass(head, budget, costs, packs=packs)
    buckets = forward.buckets(rows)
    outputs = {}
    for bucket in buckets:
        micro = forward.run(rows, bucket, "gradient")
        weighted(micro)[0].backward()
        outputs |= dict(zip(micro.rows.tolist(), micro.outputs.detach(), strict=True))
    flat = [each.grad.flatten() for each in head.parameters() if each.grad is not None]
    return torch.cat(flat), [outputs[row][: len(rows[row].ids)] for row in range(len(rows))], buckets


def assert_alike(found, expected):
    assert error(found[0], expected[0]) < EXACT
    for one, two in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-5)


class Lengths:
    """Notes the shapes of what a model reads."""

    def __init__(self, head):
        self.shapes = []
        head.body.register_forward_pre_hook(
            lambda _, __, given: self.shapes.append(tuple(given["input_ids"].shape)), with_kwargs=True
        )


@pytest.mark.parametrize("family", PACKED)
def test_gradients_are_those_of_padded_rows(family):
    head, rows = PolicyHead(model_of(family), 0.8), tree_rows()
    assert head.why_not_packed is None
    padded = gradients(head, rows, budget=64, packs=False)
    lengths = Lengths(head)
    packed = gradients(head, rows, budget=400, packs=True)
    assert_alike(packed, padded)
    tokens = sum(len(row.ids) for row in rows)
    assert sum(rows * width for rows, width in lengths.shapes) == tokens, "nothing is padded"
    assert all(rows == 1 for rows, _ in lengths.shapes)
    assert len(packed[2]) < len(padded[2])


@pytest.mark.parametrize("family", [*PACKED[:2], "gemma-3"])
def test_what_rows_share_is_packed_too(family):
    """The first tokens of rows are packed, and what stands behind them reads their keys and values."""
    head, rows = PolicyHead(model_of(family), 0.8), tree_rows()
    apart = gradients(head, rows, budget=10_000, packs=False)
    together = gradients(head, rows, budget=10_000, costs=COSTS, packs=True)
    assert_alike(together, apart)
    (bucket,) = together[2]
    first, *others = bucket.shared.tree.calls
    assert others, "some stand behind a prefix"
    assert len(set(bucket.shared.tree.lengths(first))) > 1, "rows of unlike lengths are packed"


def test_a_critics_rows_are_packed():
    critic = ValueModel(model_of("qwen3"))
    torch.nn.init.normal_(critic.head.weight, generator=torch.Generator().manual_seed(1))
    head, rows = ValueHead(critic), tree_rows()

    def values(packs):
        forward = ForwardPass(head, 300, packs=packs)
        return torch.cat(forward.outputs(rows))

    torch.testing.assert_close(values(packs=True), values(packs=False), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_checkpointing": True},
        pytest.param({"compiled": "aot_eager"}, marks=pytest.mark.slow),
    ],
)
def test_steps_are_those_of_padded_rows(options, monkeypatch):
    if "compiled" not in options:
        monkeypatch.setattr(packing, "sharing_costs", lambda *_: CHEAP)
    weights = []
    for packed_rows in ("on", "off"):
        optimizer = OptimizerSettings(
            kind="sgd",
            learning_rate=0.5,
            gradient_clip=1e9,
            packed_rows=packed_rows,
            tokens_per_micro_batch=150,
            # Of shared prefixes every call has a shape of its own, which takes a compiler minutes.
            shared_prefixes="off" if "compiled" in options else "auto",
        )
        backend = TorchBackend(PolicyHead(model_of("qwen2.5"), 1.0), optimizer, SCHEDULE, **options)
        assert backend.kernels.packed == (packed_rows == "on")
        before = {name: tensor.clone() for name, tensor in backend.export()}
        assert backend.step(tree_rows(), weighted).applied
        weights.append(torch.cat([(each - before[name]).flatten() for name, each in backend.export()]))
    assert error(weights[0], weights[1]) < 1e-5


def test_rows_with_recorded_experts_are_padded():
    head, rows = PolicyHead(model_of("qwen3-moe"), 1.0), tree_rows()
    routed = ForwardPass(head, 200, packs=True).routed(rows)
    again = [
        TrainRow(row.ids, row.mask, row.fields, experts=experts)
        for row, experts in zip(rows, routed.experts, strict=True)
    ]
    found = ForwardPass(head, 200, packs=True).outputs(again)
    for one, two in zip(found, ForwardPass(head, 200).outputs(rows), strict=True):
        torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", CAPPED)
def test_a_model_whose_scores_are_capped_is_padded(family):
    head = PolicyHead(model_of(family), 1.0)
    assert head.why_not_packed is not None
    with pytest.raises(ConfigError, match=r"optimizer\.packed_rows on: .*: set it to auto"):
        TorchBackend(head, OptimizerSettings(packed_rows="on"), SCHEDULE)
    assert not TorchBackend(head, OptimizerSettings(), SCHEDULE).kernels.packed


def test_another_attention_than_sdpa_has_no_packed_form():
    model = sharp_model()
    set_attention([model], "eager")
    assert "eager" in PolicyHead(model, 1.0).why_not_packed


def test_rows_are_packed_by_themselves_only_where_there_is_a_kernel():
    assert name_of_kernel("sdpa", PROCESSOR, torch.bfloat16) is None
    assert not TorchBackend(PolicyHead(sharp_model(), 1.0), OptimizerSettings(), SCHEDULE).kernels.packed


@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=8),
    window=st.one_of(st.none(), st.integers(1, 5)),
    key_heads=st.sampled_from([1, 2, 4]),
)
@settings(deadline=None, max_examples=40)
def test_no_row_sees_another(lengths, window, key_heads):
    draws = torch.Generator().manual_seed(0)
    total = sum(lengths)
    query = torch.randn(1, 4, total, 8, generator=draws, dtype=torch.float64)
    key, value = torch.randn(2, 1, key_heads, total, 8, generator=draws, dtype=torch.float64)
    packed = PackedRows.of(lengths, PROCESSOR)
    row = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    ahead = torch.arange(total)[:, None] - torch.arange(total)[None]
    seen = (row[:, None] == row[None]) & (ahead >= 0) & (ahead < (window or total))
    expected = scaled_dot_product_attention(
        query, *(each.repeat_interleave(4 // key_heads, dim=1) for each in (key, value)), seen, scale=0.3
    )
    layer = torch.nn.Module()
    layer.num_key_value_groups = 4 // key_heads
    bounds = {"cu_seq_lens_q": packed.bounds, "max_length_q": packed.longest}
    found, _ = attention_forward(layer, query, key, value, None, scaling=0.3, sliding_window=window, **bounds)
    torch.testing.assert_close(found, expected.transpose(1, 2))


@given(lengths=st.lists(st.integers(1, 60), max_size=40), budget=st.integers(1, 200))
def test_micro_batches_of_packed_rows_hold_every_row_once_and_no_more_than_they_may(lengths, budget):
    buckets = packed_buckets(lengths, budget)
    assert sorted(index for bucket in buckets for index in bucket) == list(range(len(lengths)))
    for bucket in buckets:
        held = [lengths[index] for index in bucket]
        assert sum(held) <= budget or len(held) == 1
        assert len(held) * max(held) <= 8 * budget or len(held) == 1
    assert packed_buckets([30] * 7, 60) == [[0, 1], [2, 3], [4, 5], [6]]


# On an accelerator


@on_an_accelerator
@pytest.mark.parametrize("window", [None, 7])
def test_a_kernel_computes_what_stretches_do(window):
    lengths = [40, 33, 33, 9, 1]
    if name_of_kernel("sdpa", ACCELERATOR, torch.bfloat16) is None:
        pytest.skip("this device, or this version of torch, has no kernel for rows of unequal lengths")
    draws = torch.Generator().manual_seed(0)
    states = [
        torch.randn(1, heads, sum(lengths), 64, generator=draws).to(ACCELERATOR).requires_grad_()
        for heads in (4, 2, 2)
    ]
    layer = torch.nn.Module()
    layer.num_key_value_groups = 2
    packed = PackedRows.of(lengths, ACCELERATOR)
    bounds = {"cu_seq_lens_q": packed.bounds, "max_length_q": packed.longest}
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        given = [each.to(dtype) for each in states]
        output, _ = attention_forward(layer, *given, None, scaling=0.125, sliding_window=window, **bounds)
        found.append([output, *torch.autograd.grad(output.float().square().sum(), states)])
    for one, two in zip(*found, strict=True):
        assert error(one.float(), two.float()) < 2e-2
