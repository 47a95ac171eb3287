"""Checkpoints that Megatron's ranks write in pieces: whoever reads them goes on, whatever divides its model."""

import copy
import hashlib

import pytest
import torch

from rollgym.trainer.backends.rank_group import MeshShape
from rollgym.trainer.backends.ranked import RankedBackend, Ranks
from rollgym.trainer.backends.transport import RankDiedError
from rollgym.trainer.records.checkpoint import CheckpointStore, RunState
from rollgym.trainer.records.pieces import SavedPieces
from tests.support.forked_ranks import ForkedRanks
from tests.support.megatron_models import DEVICE, MESHES, Made, needs_megatron
from tests.support.rank_recipes import dying_in_a_save
from tests.support.sharded_models import SUPERVISED, WIDTH, relative, settings_of, some_rows

pytestmark = [pytest.mark.slow, needs_megatron]

ADAM = settings_of(epsilon=1e-5)


def digest_of(backend):
    digest = hashlib.blake2b()
    backend.digest(digest)
    return digest.digest()


def saved_and_read(backend, folder):
    store = CheckpointStore(folder, keep=1)
    store.save(RunState(3, 3, 0, ()), {"policy": backend.state_dict()})
    read = store.load_newest(print).parts["policy"]
    assert isinstance(read, SavedPieces)
    return read


def goes_on(ranks, first, then, folder, family="qwen3", optimizer=ADAM, role="policy", **options):
    """Have ranks write pieces, which they, ranks that share the work otherwise and one process go on with."""
    made, other, alone = (
        Made(where, mesh, optimizer, 1e-3, family, in_pieces=True, **options)
        for where, mesh in ((ranks, first), (ranks, then), (None, None))
    )
    tolerance = 1e-6 if "dtype" not in options else 2e-2
    saver = made.backend(role)
    for _ in range(2):
        saver.step(some_rows(), SUPERVISED)
    pieces, digest = saved_and_read(saver, folder / "first"), digest_of(saver)
    saver.step(some_rows(), SUPERVISED)
    expected = [dict(saver.export())]

    again = made.backend(role)
    again.load_state_dict(pieces)
    assert digest_of(again) == digest, "bit by bit"
    again.step(some_rows(), SUPERVISED)
    assert relative([dict(again.export())], expected) < 1e-6

    single = alone.backend(role)
    single.load_state_dict(copy.deepcopy(pieces.whole()))
    single.step(some_rows(), SUPERVISED)
    assert relative([dict(single.export())], expected) < tolerance

    divided = other.backend(role)
    divided.load_state_dict(pieces)
    assert digest_of(divided) == digest, "bit by bit"
    back = saved_and_read(divided, folder / "back")
    divided.step(some_rows(), SUPERVISED)
    assert relative([dict(divided.export())], expected) < tolerance

    last = made.backend(role)
    last.load_state_dict(back)
    assert digest_of(last) == digest, "bit by bit"
    last.step(some_rows(), SUPERVISED)
    assert relative([dict(last.export())], expected) < 1e-6


@pytest.mark.parametrize(
    ("first", "then", "options"),
    [
        ("tensor", "data", {}),
        pytest.param(
            *("tensor", "data", {"optimizer": settings_of(kind="sgd"), "dtype": torch.bfloat16}),
            marks=pytest.mark.exhaustive,
        ),
        ("data", "tensor", {"dtype": torch.bfloat16}),
        pytest.param("experts", "tensor", {"family": "qwen3_moe"}, marks=pytest.mark.exhaustive),
        ("stages", "context", {"family": "qwen2", "role": "critic"}),
    ],
    ids=["tensor", "sgd_bf16", "data_bf16", "experts", "stages"],
)
def test_pieces_go_on_whatever_divides_the_model(ranks, first, then, options, tmp_path):
    goes_on(ranks, MESHES[first], MESHES[then], tmp_path, **options)


@pytest.mark.four_processes
def test_pieces_of_four_ranks_go_on_whatever_divides_the_model(tmp_path):
    first = MeshShape(data=4, expert=2)
    ranks = Ranks(ForkedRanks(tmp_path / "ranks"), first, DEVICE, 120.0)
    ranks.start()
    try:
        goes_on(ranks, first, MeshShape(data=2, tensor=2), tmp_path / "experts", family="qwen3_moe")
        goes_on(ranks, MeshShape(data=2, pipeline=2), MeshShape(data=4), tmp_path / "stages")
    finally:
        ranks.close()


def test_a_rank_killed_in_a_save_leaves_the_checkpoint_before(ranks, tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    made = Made(ranks, MESHES["tensor"], ADAM, 1e-3)
    recipe = dying_in_a_save(made.recipe("policy"), 1, "its own")
    backend = RankedBackend(ranks, "policy", recipe, WIDTH, in_pieces=True)
    untrained = dict(backend.parameters())
    store.save(RunState(1, 1, 0, ()), {"policy": backend.state_dict()})
    backend.step(some_rows(), SUPERVISED)
    with pytest.raises(RankDiedError):
        store.save(RunState(2, 2, 0, ()), {"policy": backend.state_dict()})
    found = CheckpointStore(tmp_path, keep=2).load_newest(print)
    assert found.state.step == 1
    whole = found.parts["policy"].whole()
    assert whole["model"].keys() == untrained.keys()
    assert all(torch.equal(whole["model"][name], tensor) for name, tensor in untrained.items())
    assert not any(bool(each["exp_avg"].any()) for each in whole["optimizer"]["state"].values())
