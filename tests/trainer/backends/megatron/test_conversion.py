"""Weights taken apart for Megatron's modules and put together again are the same."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from rollgym.trainer.backends.megatron.conversion import (
    Block,
    Shape,
    Weight,
    blocks,
    boxes,
    places,
    weights_of,
)
from rollgym.trainer.backends.megatron.layout import Place, length_multiple, pieces_of_row
from rollgym.trainer.backends.megatron.weights import MegatronPieces
from rollgym.trainer.backends.rank_group import MeshShape
from rollgym.trainer.records.pieces import ArrayBox
from tests.support.megatron_ranks import family_head

MESHES = [
    MeshShape(),
    MeshShape(tensor=2),
    MeshShape(pipeline=2),
    MeshShape(data=2, expert=2),
    MeshShape(data=4, tensor=2, pipeline=2, context=2, expert=4),
]


def own_size(weight: Weight, sizes, parts: int) -> tuple[int, ...]:
    """The shape of a rank's tensor, from the whole ones that it is made of."""
    whole = [sizes[name] for name in weight.sources]
    if weight.expert is not None:
        whole = [size[1:] for size in whole]
    if weight.kind == "columns":
        return (whole[0][0], whole[0][1] // parts)
    rows = sum(size[0] for size in whole)
    rows = rows if weight.kind == "whole" else -(-rows // parts)
    return (rows, *whole[0][1:])


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "qwen3_moe", "llama"])
@pytest.mark.parametrize("role", ["policy", "critic"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_number_has_one_place_and_comes_back(family, role, mesh):
    head = family_head(family, role)
    config = head.body.config
    if mesh.expert > 1 and family != "qwen3_moe":
        mesh = MeshShape(mesh.data, mesh.tensor, mesh.pipeline, mesh.context)
    whole = {name: tensor.detach() for name, tensor in head.model.named_parameters()}
    sizes = {name: tuple(tensor.shape) for name, tensor in whole.items()}
    shape = Shape.of(config, critic=role == "critic")
    again = {name: torch.full_like(tensor, torch.nan) for name, tensor in whole.items()}
    times = {name: torch.zeros(size, dtype=torch.int64) for name, size in sizes.items()}
    for rank in range(mesh.size):
        place = Place.of(mesh, rank)
        for weight in weights_of(shape, mesh, place):
            own = torch.zeros(own_size(weight, sizes, mesh.tensor))

            def pairs(name, content, other, weight=weight, place=place):
                return places(weight, shape, content, name, other[name], place.tensor, mesh.tensor)

            for name in weight.sources:
                for mine, theirs in pairs(name, own, whole):
                    mine.copy_(theirs)
            for name in weight.sources:
                for mine, theirs in pairs(name, own, again):
                    theirs.copy_(mine)
                if not weight.copied:
                    for _, theirs in pairs(name, own, times):
                        theirs.add_(1)
    assert_each_has_one_place(mesh, whole, again, times)


def assert_each_has_one_place(mesh, whole, again, times):
    replicas = mesh.data * mesh.context
    for name, tensor in whole.items():
        assert torch.equal(again[name], tensor), name
        expected = replicas // mesh.expert if ".experts." in name else replicas
        assert bool((times[name] == expected).all()), name


@pytest.mark.parametrize(
    ("family", "role"), [("qwen2", "critic"), ("qwen3", "policy"), ("qwen3_moe", "policy")]
)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_stretches_of_all_ranks_are_boxes_that_tile_the_whole(family, role, mesh):
    head = family_head(family, role)
    if mesh.expert > 1 and family != "qwen3_moe":
        mesh = MeshShape(mesh.data, mesh.tensor, mesh.pipeline, mesh.context)
    whole = {name: tensor.detach() for name, tensor in head.model.named_parameters()}
    sizes = {name: tuple(tensor.shape) for name, tensor in whole.items()}
    shape = Shape.of(head.body.config, critic=role == "critic")
    again = {name: torch.full_like(tensor, torch.nan) for name, tensor in whole.items()}
    times = {name: torch.zeros(size, dtype=torch.int64) for name, size in sizes.items()}
    for rank in range(mesh.size):
        place = Place.of(mesh, rank)
        for weight in weights_of(shape, mesh, place):
            if weight.copied:
                continue
            own = torch.zeros(own_size(weight, sizes, mesh.tensor))
            for name in weight.sources:
                for mine, theirs in places(weight, shape, own, name, whole[name], place.tensor, mesh.tensor):
                    mine.copy_(theirs)
            # Three stretches, which begin and end within rows.
            ends = [own.numel() * third // 3 + third % 3 for third in range(4)]
            for name in weight.sources:
                parts = (tuple(own.shape), name, sizes[name], place.tensor, mesh.tensor)
                for block in blocks(weight, shape, *parts):
                    for start, stop in pairwise(ends):
                        for box in boxes(block, start, stop):
                            assert start <= box.own.start < box.own.stop <= stop
                            there = tuple(
                                slice(at, at + size) for at, size in zip(box.offset, box.sizes, strict=True)
                            )
                            numbers = own.view(-1)[box.own.start : box.own.stop]
                            again[name][there] = numbers.view(box.sizes)
                            times[name][there] += 1
    assert_each_has_one_place(mesh, whole, again, times)


def test_a_stretch_of_rows_is_a_box_with_the_rest_of_a_row_at_either_end():
    block = Block(start=10, offset=(7, 100, 50), sizes=(1, 5, 4))
    assert list(boxes(block, 0, 13)) == [ArrayBox(range(10, 13), (7, 100, 50), (1, 1, 3))]
    assert list(boxes(block, 12, 25)) == [
        ArrayBox(range(12, 14), (7, 100, 52), (1, 1, 2)),
        ArrayBox(range(14, 22), (7, 101, 50), (1, 2, 4)),
        ArrayBox(range(22, 25), (7, 103, 50), (1, 1, 3)),
    ]
    assert list(boxes(block, 15, 16)) == [ArrayBox(range(15, 16), (7, 101, 51), (1, 1, 1))]
    assert list(boxes(block, 30, 40)) == []
    bias = Block(start=10, offset=(7,), sizes=(5,))
    assert list(boxes(bias, 12, 99)) == [ArrayBox(range(12, 15), (9,), (3,))]


def test_what_several_ranks_hold_is_written_by_one_of_them():
    head, mesh = family_head("qwen3", "policy"), MeshShape(pipeline=2, tensor=2)
    sizes = {name: tuple(tensor.shape) for name, tensor in head.model.named_parameters()}
    shape = Shape.of(head.body.config)
    copied = {
        "model.embed_tokens.weight": [],
        "model.norm.weight": [],
        "model.layers.0.self_attn.q_proj.weight": [],
    }
    for rank in range(mesh.size):
        weights = weights_of(shape, mesh, Place.of(mesh, rank))
        own = {each.name: torch.zeros(own_size(each, sizes, mesh.tensor)) for each in weights}
        body = SimpleNamespace(named_parameters=own.items)
        group = SimpleNamespace(shape=mesh, rank=rank)
        pieces = dict(MegatronPieces(body, group, shape, sizes, torch.float32).named())
        for name, found in copied.items():
            found.append({box.copied for box in pieces[name].held})
    assert list(copied.values()) == [
        [{False}, {False}, {True}, {True}],  # tied: the last stage has it again
        [set(), set(), {False}, {True}],
        [{False}, {False}, set(), set()],
    ]


def test_heads_lie_group_by_group():
    shape = Shape(1, heads=4, groups=2, experts=0, biased=True, normed=False, tied=True, critic=False)
    weight = Weight("linear_qkv.bias", ("q", "k", "v"), "qkv")
    q, k, v = torch.arange(8), torch.arange(4) + 100, torch.arange(4) + 200
    for part, expected in enumerate(([0, 1, 2, 3, 100, 101, 200, 201], [4, 5, 6, 7, 102, 103, 202, 203])):
        own = torch.zeros(8, dtype=torch.int64)
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            for mine, theirs in places(weight, shape, own, name, tensor, part, 2):
                mine.copy_(theirs)
        assert own.tolist() == expected


@pytest.mark.parametrize("apart", [True, False], ids=["two_weights", "one_weight"])
def test_each_rank_has_gate_rows_above_the_gated_ones(apart):
    shape = Shape(
        1, heads=1, groups=1, experts=0 if apart else 1, biased=False, normed=False, tied=True, critic=False
    )
    gate, up = torch.arange(4)[:, None], torch.arange(4)[:, None] + 10
    sources = {"gate": gate, "up": up} if apart else {"both": torch.cat([gate, up])[None]}
    weight = Weight("linear_fc1.weight", tuple(sources), "gate_up", None if apart else 0)
    for part, expected in enumerate(([0, 1, 10, 11], [2, 3, 12, 13])):
        own = torch.zeros(4, 1, dtype=torch.int64)
        for name, tensor in sources.items():
            for mine, theirs in places(weight, shape, own, name, tensor, part, 2):
                mine.copy_(theirs)
        assert own[:, 0].tolist() == expected


def test_a_tied_embedding_is_in_the_last_stage_again_and_counts_once():
    shape = Shape(2, heads=2, groups=1, experts=0, biased=False, normed=True, tied=True, critic=False)
    mesh = MeshShape(pipeline=2)
    first, last = (list(weights_of(shape, mesh, Place.of(mesh, rank))) for rank in (0, 1))
    assert [each.name for each in first if "embed" in each.sources[0]] == ["embedding.word_embeddings.weight"]
    assert [(each.name, each.copied) for each in last if "embed" in each.sources[0]] == [
        ("output_layer.weight", True)
    ]
    alone = list(weights_of(shape, MeshShape(), Place.of(MeshShape(), 0)))
    assert [each.name for each in alone if "embed" in each.sources[0]] == ["embedding.word_embeddings.weight"]


def test_parts_of_a_row_are_its_front_and_its_end():
    mesh = MeshShape(context=2, tensor=3)
    assert length_multiple(mesh) == 12
    assert [list(pieces_of_row(12, mesh, rank)) for rank in (0, 1)] == [
        [range(0, 3), range(9, 12)],
        [range(3, 6), range(6, 9)],
    ]
    assert list(pieces_of_row(5, MeshShape(), 0)) == [range(5)]
