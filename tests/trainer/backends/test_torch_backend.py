"""The backend computes what the library computes, whatever the cut into micro-batches."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollgym.trainer.algorithms.aggregation import collect
from rollgym.trainer.backends.base import TrainRow
from rollgym.trainer.backends.batching import length_buckets, pad_rows
from rollgym.trainer.backends.heads import PolicyHead, ValueHead
from rollgym.trainer.backends.torch_backend import Schedule, TorchBackend
from rollgym.trainer.config.optimizer import OptimizerSettings
from rollgym.trainer.models.value_head import ValueModel
from tests.support.tiny_models import reference_logprobs, sharp_model

CONSTANT = Schedule(1e-2, 0, 10, "constant")


def backend_of(*, budget=64, seed=0, temperature=1.0, schedule=CONSTANT) -> TorchBackend:
    settings = OptimizerSettings(tokens_per_micro_batch=budget, weight_decay=0.01)
    return TorchBackend(PolicyHead(sharp_model(seed), temperature), settings, schedule)


def rows_of(lengths=(5, 9, 3, 9, 14)) -> list[TrainRow]:
    generator = torch.Generator().manual_seed(1)
    rows = []
    for length in lengths:
        mask = torch.rand(length, generator=generator) < 0.6
        mask[0] = False
        rows.append(
            TrainRow(
                torch.randint(2, 40, (length,), generator=generator),
                mask,
                {"weight": torch.randn(length, generator=generator)},
            )
        )
    return rows


def weighted_loss(micro):
    loss = -(micro.outputs * micro.fields["weight"] * micro.mask).sum() / 20
    return loss, collect({"loss": (loss, torch.zeros(()))})


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_outputs_are_the_librarys_logprobs(temperature):
    rows = rows_of()
    outputs = backend_of(temperature=temperature).forward(rows)
    for row, output in zip(rows, outputs, strict=True):
        expected = torch.tensor([0.0, *reference_logprobs(sharp_model(), row.ids.tolist(), temperature)])
        torch.testing.assert_close(output, torch.where(row.mask, expected, 0.0), atol=2e-4, rtol=1e-4)


def test_rows_never_see_each_other():
    rows = rows_of()
    together = backend_of(budget=10_000).forward(rows)
    for place, row in enumerate(rows):
        (alone,) = backend_of().forward([row])
        torch.testing.assert_close(together[place], alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("budget", [1, 14, 40, 10_000])
def test_the_update_does_not_depend_on_micro_batches(budget):
    def updated(size):
        backend = backend_of(budget=size)
        backend.step(rows_of(), weighted_loss)
        return dict(backend.export())

    expected, got = updated(25), updated(budget)
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, atol=1e-5, rtol=1e-4)


def test_entropy_is_that_of_the_distribution():
    row = TrainRow(torch.tensor([3, 4, 5]), torch.tensor([False, False, True]))
    seen = []

    def loss(micro):
        seen.append(micro.entropy)
        return micro.outputs.sum() * 0.0, {}

    backend_of().step([row], loss, entropy="metric")
    with torch.no_grad():
        distribution = sharp_model()(torch.tensor([[3, 4]])).logits[0, -1].log_softmax(-1)
    expected = -(distribution.exp() * distribution).sum().item()
    assert seen[0][0, 2].item() == pytest.approx(expected, abs=1e-4)
    assert not seen[0].requires_grad


def test_a_resumed_optimizer_goes_on_exactly():
    straight, first = backend_of(), backend_of()
    for backend in (straight, first):
        backend.step(rows_of(), weighted_loss)
    resumed = backend_of(seed=5)
    resumed.load_state_dict(first.state_dict())
    for backend in (straight, resumed):
        backend.step(rows_of((4, 8)), weighted_loss)
    for (name, tensor), (other_name, other) in zip(straight.export(), resumed.export(), strict=True):
        assert name == other_name
        assert torch.equal(tensor, other), name


def test_tied_weights_are_exported_once():
    backend = backend_of()
    names = [name for name, _ in backend.export()]
    assert len(names) == len(set(names))
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names


def test_the_first_token_cannot_be_trained_on():
    with pytest.raises(ValueError, match="nothing predicts it"):
        backend_of().forward([TrainRow(torch.tensor([3, 4]), torch.tensor([True, True]))])


def test_a_critic_starts_at_zero_and_learns_its_targets():
    head = ValueHead(ValueModel(sharp_model()))
    backend = TorchBackend(head, OptimizerSettings(), CONSTANT)
    rows = [TrainRow(row.ids, row.mask, {"target": row.mask.float()}) for row in rows_of()]
    assert all(output.abs().max() == 0.0 for output in backend.forward(rows))

    def loss(micro):
        error = ((micro.outputs - micro.fields["target"]).square() * micro.mask).mean()
        return error, collect({"error": (error, torch.ones(()))})

    errors = [backend.step(rows, loss).metrics["error"][0] for _ in range(30)]
    assert errors[-1] < 0.2 * errors[0]


@given(lengths=st.lists(st.integers(1, 50), max_size=30), budget=st.integers(1, 120))
def test_buckets_hold_every_row_once_within_the_budget(lengths, budget):
    buckets = length_buckets(lengths, budget)
    assert sorted(place for bucket in buckets for place in bucket) == list(range(len(lengths)))
    for bucket in buckets:
        assert len(bucket) == 1 or len(bucket) * max(lengths[place] for place in bucket) <= budget


def test_padding_keeps_the_type():
    for dtype in (torch.bool, torch.int16, torch.int64, torch.float32, torch.float64):
        padded = pad_rows([torch.ones(2, dtype=dtype), torch.ones(3, dtype=dtype)])
        assert padded.dtype == dtype
        assert padded.tolist() == [[1, 1, 0], [1, 1, 1]]
    assert pad_rows([]).shape == (0, 0)


def test_schedules():
    cosine = Schedule(2.0, warmup_steps=2, total_steps=12, kind="cosine")
    assert [cosine.rate(step) for step in (0, 1, 2, 7, 12)] == pytest.approx([1.0, 2.0, 2.0, 1.0, 0.0])
    linear = Schedule(2.0, 0, 10, "linear")
    assert [linear.rate(step) for step in (0, 5, 10, 11)] == pytest.approx([2.0, 1.0, 0.0, 0.0])
    assert math.isclose(Schedule(2.0, 0, 10, "constant").rate(99), 2.0)
