"""Experts that were recorded are taken in place of the router's, and weighed by the router as it is now."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import pad

from rollgym.trainer.algorithms.aggregation import collect
from rollgym.trainer.backends.heads import PolicyHead
from rollgym.trainer.backends.optimizer import Schedule
from rollgym.trainer.backends.routing import packed_experts, taken_again
from rollgym.trainer.backends.torch_backend import TorchBackend
from rollgym.trainer.config.optimizer import OptimizerSettings
from tests.support.megatron_ranks import family_model
from tests.support.routed_rows import LAYERS, TAKEN, routers, rows


def seen(model):
    """What each router gives out, forward by forward."""
    outputs = []
    for layer, router in enumerate(routers(model)):
        router.register_forward_hook(lambda _, __, output, layer=layer: outputs.append((layer, output)))
    return outputs


def weighted(micro):
    loss = (micro.outputs * micro.mask).sum()
    return loss, collect({"loss": (loss.detach(), torch.ones(()))})


def backend(model, rate=0.0, **options):
    settings = OptimizerSettings(kind="sgd", gradient_clip=1e9, tokens_per_micro_batch=10_000)
    return TorchBackend(PolicyHead(model, 1.0), settings, Schedule(rate, 0, 1, "constant"), **options)


def laid_out(given):
    """Rows as a head reads them: ids, the places of tokens that are wanted, and experts."""
    width = max(len(row.ids) for row in given)
    ids, mask = (
        torch.stack([pad(getattr(row, name), (0, width - len(row.ids))) for row in given])
        for name in ("ids", "mask")
    )
    row, column = mask.nonzero(as_tuple=True)
    return ids, row, column, packed_experts(given, width, torch.device("cpu"))


def test_the_experts_are_those_recorded_and_their_weights_the_routers_own():
    model = family_model("qwen3_moe")
    head = PolicyHead(model, 1.0)
    outputs = seen(model)  # asked after the hooks that replace
    ids, row, column, expected = laid_out(rows())
    head(ids, row, column, "none", None, expected)
    expected = expected.unflatten(2, (LAYERS, TAKEN))
    known = (expected >= 0).all(-1)
    assert [layer for layer, _ in outputs] == [0, 1]
    for layer, (logits, weights, taken) in outputs:
        wanted, here = expected[:, :, layer].flatten(0, 1), known[:, :, layer].flatten()
        assert torch.equal(taken[here], wanted[here])
        own = logits.softmax(-1)
        assert not torch.equal(taken[here], own.topk(TAKEN).indices[here]), "the router would take others"
        assert torch.equal(taken[~here], own.topk(TAKEN).indices[~here])
        picked = own.gather(-1, taken)
        torch.testing.assert_close(weights, picked / picked.sum(-1, keepdim=True))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_routers_own_choice_recorded_changes_nothing(checkpointing):
    models = [family_model("qwen3_moe") for _ in range(2)]
    free, again = (backend(model, 1.0, gradient_checkpointing=checkpointing) for model in models)
    outputs = seen(models[0])
    plain = [replace(row, experts=None) for row in rows()]
    ids, row, column, _ = laid_out(plain)
    PolicyHead(models[0], 1.0)(ids, row, column, "none")
    chosen = torch.stack([taken for _, (_, _, taken) in outputs[-2:]], dim=1).view(3, 9, LAYERS, TAKEN)
    recorded = [
        replace(row, experts=chosen[place, : len(row.ids)].flatten(1).to(torch.int16))
        for place, row in enumerate(plain)
    ]
    for one, other in zip(free.forward(plain), again.forward(recorded), strict=True):
        torch.testing.assert_close(one, other)
    free.step(plain, weighted)
    again.step(recorded, weighted)
    for (name, one), (_, other) in zip(free.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(one, other, msg=name)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_gradient_reaches_the_router_through_the_recorded_experts(checkpointing):
    model = family_model("qwen3_moe")
    before = [router.weight.detach().clone() for router in routers(model)]
    trained = backend(model, 1.0, gradient_checkpointing=checkpointing)
    expected = family_model("qwen3_moe")
    reference = PolicyHead(expected, 1.0)
    given = rows()
    trained.step(given, weighted)
    ids, row, column, experts = laid_out(given)
    reference(ids, row, column, "none", None, experts)[0].sum().backward()
    for router, other, old in zip(routers(model), routers(expected), before, strict=True):
        assert other.weight.grad.abs().max() > 0
        torch.testing.assert_close(old - router.weight.detach(), other.weight.grad, atol=1e-4, rtol=1e-4)


def test_rows_that_begin_alike_are_computed_apart_where_experts_were_recorded():
    model = family_model("qwen3_moe")
    first = rows()[1]
    alike = [first, replace(first, experts=first.experts.flip(-1))]
    one, other = backend(model).forward(alike)
    assert not torch.equal(one, other)


def test_what_fits_no_router_is_refused():
    model = family_model("qwen3_moe")
    trained = backend(model)
    row = rows()[0]
    with pytest.raises(
        ValueError, match="3 experts were recorded for each token, and the model has 2 layers"
    ):
        trained.forward([replace(row, experts=row.experts[:, :3])])
    with pytest.raises(ValueError, match="is the inference server's model another one"):
        trained.forward([replace(row, experts=row.experts[:, :2])])
    for wrong in (row.experts + 3, torch.zeros_like(row.experts), row.experts - 9):
        with pytest.raises(
            ValueError, match="recorded experts are not of 4, or a token took one of them twice"
        ):
            trained.forward([replace(row, experts=wrong)])
    with pytest.raises(ValueError, match="models of several shapes"):
        packed_experts([row, replace(row, experts=row.experts[:, :2])], 9, torch.device("cpu"))
    dense = backend(family_model("qwen2"))
    with pytest.raises(ValueError, match="the model has 0"):
        dense.forward([row])


def test_nothing_recorded_is_nothing_to_take():
    row = replace(rows()[0], experts=None)
    assert packed_experts([row], 6, torch.device("cpu")) is None
    chosen = torch.tensor([[0, 1]])
    assert taken_again(chosen, None) is chosen
    assert taken_again(chosen, torch.tensor([[-1, -1]])).tolist() == [[0, 1]]
