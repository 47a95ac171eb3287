"""What may be set of ranks, in each kind that divides a model: numbers, memory, adapters; and their checkpoints."""

import copy
import hashlib

import pytest
import torch
from safetensors.torch import load_file

from rollgym.trainer.backends.optimizer import Schedule
from rollgym.trainer.backends.rank_group import MeshShape
from rollgym.trainer.backends.ranked import RankedBackend, Ranks
from rollgym.trainer.backends.torch_backend import TorchBackend
from rollgym.trainer.backends.transport import RankDiedError
from rollgym.trainer.core.errors import RunError
from rollgym.trainer.core.run_files import WriteError
from rollgym.trainer.learn.batches import episode_batch, row_builder
from rollgym.trainer.learn.learner import Learner, Models
from rollgym.trainer.models.load import load_model
from rollgym.trainer.records.checkpoint import CheckpointStore, RunState
from rollgym.trainer.records.pieces import SavedPieces, flattened
from tests.support.forked_ranks import ForkedRanks
from tests.support.played_groups import played_groups
from tests.support.rank_recipes import Moved, OnAFullDisk, Recipe, dying_in_a_save, head_of
from tests.support.sharded_models import (
    DEVICE,
    MESHES,
    PRESETS,
    SUPERVISED,
    WIDTH,
    Made,
    assert_equal_losses,
    relative,
    settings_of,
    some_rows,
    weights_of,
)
from tests.support.tiny_models import sharp_model

pytestmark = pytest.mark.slow


def started(folder, mesh, timeout_s=120.0):
    ranks = Ranks(ForkedRanks(folder), mesh, DEVICE, timeout_s)
    ranks.start()
    return ranks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    opened = started(tmp_path_factory.mktemp("ranks"), MESHES["data"])
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    opened = started(tmp_path_factory.mktemp("alone"), MeshShape())
    yield opened
    opened.close()


def needs(kind):
    if kind != "fsdp2":
        pytest.importorskip("deepspeed", reason="the extra [deepspeed] is not installed")


BF16 = {"dtype": torch.bfloat16}


@pytest.mark.parametrize(
    ("kind", "options", "tolerance"),
    [
        ("fsdp2", {"gradient_checkpointing": True}, 1e-6),
        ("fsdp2", {"cpu_offload": True}, 1e-6),
        ("fsdp2", {**BF16, "cpu_offload": True}, 2e-2),
        ("zero2", {"cpu_offload": True}, 1e-6),
        ("zero2", BF16, 2e-2),
        ("zero3", {"gradient_checkpointing": True, "cpu_offload": True}, 1e-6),
        ("zero3", BF16, 2e-2),
    ],
)
def test_options_mean_what_they_mean_in_one_process(ranks, kind, options, tolerance):
    needs(kind)
    optimizer = settings_of(epsilon=1e-5)
    found, expected = (
        Made(where, kind, optimizer, 1e-3, **options).backend("policy") for where in (ranks, None)
    )
    start = dict(expected.export())
    for _ in range(3):
        found.step(some_rows(), SUPERVISED)
        expected.step(some_rows(), SUPERVISED)
    exported = dict(found.export())
    assert relative([exported], [dict(expected.export())]) < tolerance
    assert {tensor.dtype for tensor in exported.values()} == {options.get("dtype", torch.float32)}
    assert "lm_head.weight" not in exported, "the head is the embedding"
    # What is trained is in float32, whatever it is computed in: steps that bfloat16 cannot take add up.
    masters = found.state_dict()["model"]
    assert {tensor.dtype for tensor in masters.values()} == {torch.float32}
    moved = [(masters[name] - start[name].float()).abs() for name in start]
    assert any(bool((each > 0).any()) for each in moved)


@pytest.mark.parametrize("kind", ["fsdp2", "zero3"])
def test_ranks_pack_their_rows(ranks, kind):
    needs(kind)
    packed, padded = (settings_of(epsilon=1e-5, packed_rows=setting) for setting in ("on", "off"))
    found = Made(ranks, kind, packed, 1e-3).backend("policy")
    expected = Made(None, kind, padded, 1e-3).backend("policy")
    assert found.kernels.packed
    assert not expected.kernels.packed
    torch.testing.assert_close(
        found.forward(some_rows()), expected.forward(some_rows()), rtol=1e-4, atol=1e-5
    )
    for _ in range(3):
        found.step(some_rows(), SUPERVISED)
        expected.step(some_rows(), SUPERVISED)
    assert relative([dict(found.export())], [dict(expected.export())]) < 1e-6


@pytest.mark.parametrize("kind", ["fsdp2", "zero2", "zero3"])
def test_adapters_are_trained_saved_and_switched_off(ranks, kind, tmp_path):
    needs(kind)
    optimizer = settings_of(epsilon=1e-5)
    found = RankedBackend(ranks, "policy", Recipe(kind, "policy", optimizer, 1e-3, lora=True), WIDTH)
    base, start = (
        RankedBackend(ranks, name, Recipe(kind, "base", optimizer, 1e-3, warm=warm), WIDTH)
        for name, warm in (("base", False), ("start", True))
    )
    expected = TorchBackend(head_of("policy", lora=True), optimizer, Schedule(1e-3, 0, 1, "constant"))
    assert found.has_adapter
    before = dict(found.export())
    for _ in range(2):
        found.step(some_rows(), SUPERVISED)
        expected.step(some_rows(), SUPERVISED)
    exported = dict(found.export())
    assert relative([exported], [dict(expected.export())]) < 1e-6
    assert any(not torch.equal(exported[name], before[name]) for name in before)
    found.save_adapter(tmp_path / "ranks")
    expected.save_adapter(tmp_path / "one")
    one, other = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("ranks", "one"))
    assert relative([one], [other]) < 1e-5
    # The reference is the policy with its adapters off, or as they were when the run began.
    for reference, lora in ((base, False), (start, True)):
        untrained = TorchBackend(
            head_of("policy", lora=lora), optimizer, Schedule(1e-3, 0, 1, "constant")
        ).forward(some_rows())
        for line, plain in zip(reference.forward(some_rows()), untrained, strict=True):
            torch.testing.assert_close(line, plain, atol=1e-4, rtol=1e-4)
        reference.load_state_dict(reference.state_dict())
        reference.drop()
    assert relative([dict(found.export())], [exported]) == 0.0, "the policy is as it was"


def test_what_is_saved_is_what_other_tools_load(ranks, tmp_path):
    backend = Made(ranks, "fsdp2", settings_of(), 1e-3).backend("policy")
    backend.step(some_rows(), SUPERVISED)
    backend.save(tmp_path)
    loaded = load_model(tmp_path)
    for name, tensor in backend.parameters():
        assert torch.equal(dict(loaded.named_parameters())[name], tensor), name
    digest, again = hashlib.blake2b(), hashlib.blake2b()
    backend.digest(digest)
    backend.step(some_rows(), SUPERVISED)
    backend.digest(again)
    assert digest.digest() != again.digest()


PARTS = ("parameters", "gradients", "optimizer")


@pytest.mark.parametrize("kind", ["fsdp2", "zero2", "zero3"])
def test_offloaded_models_go_on_where_they_were(ranks, kind):
    """On processors nothing moves, and the calls are the same; on accelerators each part leaves and comes back."""
    needs(kind)
    backend = Made(ranks, kind, settings_of(epsilon=1e-5), 1e-3).backend("policy")
    other = Made(ranks, kind, settings_of(epsilon=1e-5), 1e-3).backend("critic")
    backend.step(some_rows(), SUPERVISED)
    for parts in [*((part,) for part in PARTS), PARTS]:
        before = dict(backend.export())
        backend.offload(parts)
        assert [len(line) for line in other.forward(some_rows()[:1])] == [5]
        backend.onload(parts)
        assert all(torch.equal(tensor, before[name]) for name, tensor in backend.export()), parts
        assert backend.step(some_rows(), SUPERVISED).applied


@pytest.mark.parametrize("kind", ["zero1", "zero3"])
def test_what_an_engine_moved_away_and_back_is_trained_and_saved(ranks, kind):
    needs(kind)
    recipe = Moved(Recipe(kind, "policy", settings_of(epsilon=1e-5), 1e-3))
    moved = RankedBackend(ranks, "moved", recipe, WIDTH)
    stays = Made(ranks, kind, settings_of(epsilon=1e-5), 1e-3).backend("policy")
    for parts in [*((part,) for part in PARTS), PARTS]:
        for backend in (moved, stays):
            backend.step(some_rows(), SUPERVISED)
        moved.offload(parts)
        moved.onload(parts)
        for (path, found), (_, expected) in zip(
            flattened(moved.state_dict()), flattened(stays.state_dict()), strict=True
        ):
            assert not isinstance(found, torch.Tensor) or torch.equal(found, expected), (parts, path)


# Checkpoints


async def one_more(models, settings):
    learner = Learner(settings, models, seed=1)
    return await learner.update(episode_batch(played_groups(sharp_model()), row_builder("step")), 3)


def saved_and_read(models, folder):
    store = CheckpointStore(folder, keep=1)
    store.save(RunState(3, 3, 0, ()), models.state_dicts())
    return store.load_newest(print).parts


@pytest.mark.parametrize(
    ("kind", "in_pieces"),
    [("fsdp2", False), ("fsdp2", True), ("zero1", True), ("zero3", False), ("zero3", True)],
    ids=["fsdp2-whole", "fsdp2-in_pieces", "zero1-in_pieces", "zero3-whole", "zero3-in_pieces"],
)
async def test_a_run_goes_on_with_another_number_of_ranks(ranks, alone, kind, in_pieces, tmp_path):
    needs(kind)
    settings, optimizer = PRESETS["ppo"], settings_of(epsilon=1e-5)
    saver = Made(ranks, kind, optimizer, 1e-3, in_pieces=in_pieces)
    models = saver.models(settings)
    learner = Learner(settings, models, seed=1)
    for step in range(2):
        await learner.update(episode_batch(played_groups(sharp_model()), row_builder("step")), step)
    parts = saved_and_read(models, tmp_path / "two")
    assert isinstance(parts["policy"], SavedPieces) == in_pieces
    expected = await one_more(models, settings)
    weights = weights_of(models)

    # Two ranks to one, to this process, and to two others; and from the one back to two.
    single = Made(alone, kind, optimizer, 1e-3, in_pieces=in_pieces).models(settings)
    single.load_state_dicts(parts)
    back = saved_and_read(single, tmp_path / "one")
    others = [
        single,
        Made(None, "torch", optimizer, 1e-3).models(settings),
        saver.models(settings),
        saver.models(settings),
    ]
    for number, (resumed, state) in enumerate(zip(others, (parts, parts, parts, back), strict=True)):
        resumed.load_state_dicts(copy.deepcopy(state))  # torch's optimizers train on in what they are given
        # As close as steps of Adam are on other meshes.
        assert_equal_losses([await one_more(resumed, settings)], [expected], rel=1e-4)
        assert relative(weights_of(resumed), weights) < 1e-5, number


@pytest.mark.parametrize("in_pieces", [False, True], ids=["whole", "in_pieces"])
async def test_a_run_goes_on_where_layers_are_divided_otherwise(ranks, in_pieces, tmp_path):
    settings, optimizer = PRESETS["grpo"], settings_of(epsilon=1e-5)
    divided = started(tmp_path / "ranks", MeshShape(tensor=2))
    try:
        by_layers = Made(divided, "fsdp2", optimizer, 1e-3, in_pieces=in_pieces).models(settings)
        await Learner(settings, by_layers, seed=1).update(
            episode_batch(played_groups(sharp_model()), row_builder("step")), 0
        )
        parts = saved_and_read(by_layers, tmp_path / "layers")
        by_rows = Made(ranks, "fsdp2", optimizer, 1e-3, in_pieces=in_pieces).models(settings)
        alone = Made(None, "torch", optimizer, 1e-3).models(settings)
        for models in (by_rows, alone):
            models.load_state_dicts(copy.deepcopy(parts))
        of_rows = saved_and_read(by_rows, tmp_path / "rows")
        expected = await one_more(by_layers, settings)
        weights = weights_of(by_layers)
        # The ranks forget the models that these take the place of.
        back = Made(divided, "fsdp2", optimizer, 1e-3, in_pieces=in_pieces).models(settings)
        back.load_state_dicts(of_rows)
        for models in (by_rows, alone, back):
            assert_equal_losses([await one_more(models, settings)], [expected], rel=1e-4)
            assert relative(weights_of(models), weights) < 1e-5
    finally:
        divided.close()


def digest_of(backend):
    digest = hashlib.blake2b()
    backend.digest(digest)
    return digest.digest()


@pytest.mark.parametrize(
    ("kind", "role", "steps", "optimizer", "options"),
    [
        ("zero1", "policy", 2, {"epsilon": 1e-5}, {}),
        pytest.param("zero2", "critic", 0, {"epsilon": 1e-5}, {}, marks=pytest.mark.exhaustive),
        ("zero2", "policy", 2, {"kind": "sgd"}, {"dtype": torch.bfloat16}),
        pytest.param("zero3", "policy", 0, {"epsilon": 1e-5}, {}, marks=pytest.mark.exhaustive),
        ("zero3", "critic", 2, {"epsilon": 1e-5}, {"dtype": torch.bfloat16, "cpu_offload": True}),
    ],
)
def test_pieces_of_one_kind_are_those_of_another_bit_by_bit(
    ranks, kind, role, steps, optimizer, options, tmp_path
):
    needs(kind)
    settings = settings_of(**optimizer)
    made, other = (Made(ranks, each, settings, 1e-3, in_pieces=True, **options) for each in (kind, "fsdp2"))

    def read_by(maker, state):
        backend = maker.backend(role)
        backend.step(some_rows(), SUPERVISED)  # what it has of its own goes
        backend.load_state_dict(state)
        return backend

    saver = made.backend(role)
    for _ in range(steps):
        saver.step(some_rows(), SUPERVISED)
    digest, before = digest_of(saver), dict(saver.parameters())
    pieces = saved_and_read(Models(saver), tmp_path / "first")["policy"]
    assert isinstance(pieces, SavedPieces)
    rows = some_rows()
    expected = saver.step(rows, SUPERVISED).gradient_norm

    divided = read_by(other, pieces)
    assert digest_of(divided) == digest
    back = saved_and_read(Models(divided), tmp_path / "back")["policy"]
    for path, content in flattened(pieces.whole()):
        again = dict(flattened(back.whole()))[path]
        assert torch.equal(again, content) if isinstance(content, torch.Tensor) else again == content, path

    resumed = read_by(made, back)
    assert digest_of(resumed) == digest
    assert all(torch.equal(tensor, before[name]) for name, tensor in resumed.parameters())
    assert resumed.step(rows, SUPERVISED).gradient_norm == pytest.approx(expected, rel=1e-6)
    assert relative([dict(resumed.export())], [dict(saver.export())]) < 1e-6


def test_pieces_of_an_optimizer_without_a_state_are_read_in_one_process(alone, tmp_path):
    made, single = (
        Made(where, "fsdp2", settings_of(kind="sgd"), 1e-3, in_pieces=True) for where in (alone, None)
    )
    saver, resumed = made.backend("policy"), single.backend("policy")
    saver.step(some_rows(), SUPERVISED)
    resumed.load_state_dict(saved_and_read(Models(saver), tmp_path)["policy"].whole())
    for backend in (saver, resumed):
        backend.step(some_rows(), SUPERVISED)
    assert relative([dict(resumed.export())], [dict(saver.export())]) < 1e-6


def test_pieces_of_another_model_are_refused(tmp_path):
    # Ranks of its own: a call that fails ends them.
    ranks = started(tmp_path / "ranks", MeshShape())
    try:
        policy = Made(ranks, "fsdp2", settings_of(), 1e-3, in_pieces=True).backend("policy")
        critic = Made(ranks, "fsdp2", settings_of(), 1e-3, in_pieces=True).backend("critic")
        parts = saved_and_read(Models(policy, critic), tmp_path / "saved")
        with pytest.raises(ValueError, match="its policy is of another shape"):
            Models(policy).load_state_dicts({"policy": parts["critic"]})
    finally:
        ranks.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_under_one_ranks_pieces_is_named_and_the_checkpoint_before_stays(rank, tmp_path):
    ranks = started(tmp_path / "ranks", MeshShape(data=2))
    try:
        store = CheckpointStore(tmp_path / "checkpoints", keep=2)
        backend = RankedBackend(ranks, "policy", OnAFullDisk(settings_of(), rank), WIDTH, in_pieces=True)
        store.save(RunState(1, 1, 0, ()), {"policy": backend.state_dict()})
        with pytest.raises(WriteError, match=r"cannot write .*step_000002.*: File too large"):
            store.save(RunState(2, 2, 0, ()), {"policy": backend.state_dict()})
    finally:
        ranks.close()
    assert store.load_newest(print).state.step == 1
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["latest", "step_000001"], "no room is taken"


@pytest.mark.parametrize("kind", ["fsdp2", "zero2", "zero3"])
def test_weights_that_are_not_finite_are_named_and_not_written(kind, tmp_path):
    needs(kind)
    ranks = started(tmp_path / "ranks", MeshShape())
    try:
        store = CheckpointStore(tmp_path / "checkpoints", keep=2)
        backend = Made(ranks, kind, settings_of(), 1e-3, in_pieces=True).backend("policy")
        odd = Made(None, kind, settings_of(), 1e-3).backend("policy").state_dict()
        odd["model"]["model.norm.weight"][-1] = torch.nan
        backend.load_state_dict(odd)
        with pytest.raises(RunError, match=r"because model\.model\.norm\.weight is not finite"):
            store.save(RunState(1, 1, 0, ()), {"policy": backend.state_dict()})
    finally:
        ranks.close()
    assert not list((tmp_path / "checkpoints").glob("step_*"))


def test_a_full_disk_under_the_model_is_named(tmp_path):
    ranks = started(tmp_path / "ranks", MeshShape())
    try:
        backend = RankedBackend(ranks, "policy", OnAFullDisk(settings_of(), 0), WIDTH)
        with pytest.raises(WriteError, match=r"cannot write .*model.*: File too large"):
            backend.save(tmp_path / "model")
    finally:
        ranks.close()


def test_pieces_that_ranks_do_not_see_are_told_and_kill_nobody(tmp_path):
    ranks = started(tmp_path / "ranks", MeshShape())
    try:
        backend = Made(ranks, "fsdp2", settings_of(), 1e-3, in_pieces=True).backend("policy")
        parts = saved_and_read(Models(backend), tmp_path / "saved")
        for file in parts["policy"].folder.glob("*.distcp"):
            file.unlink()
        with pytest.raises(RunError, match="rank 0 of 1 failed: FileNotFoundError"):
            backend.load_state_dict(parts["policy"])
        with pytest.raises(FileNotFoundError):
            parts["policy"].whole()
    finally:
        ranks.close()


@pytest.mark.parametrize(
    ("rank", "when"), [(1, "its own"), (0, "all written")], ids=["its own", "all written"]
)
def test_a_rank_killed_in_a_save_leaves_the_checkpoint_before(rank, when, tmp_path):
    ranks = started(tmp_path / "ranks", MeshShape(data=2 if rank else 1))
    try:
        store = CheckpointStore(tmp_path / "checkpoints", keep=2)
        recipe = dying_in_a_save(Recipe("fsdp2", "policy", settings_of(), 1e-3), rank, when)
        backend = RankedBackend(ranks, "policy", recipe, WIDTH, in_pieces=True)
        store.save(RunState(1, 1, 0, ()), {"policy": backend.state_dict()})
        whole = store.load_newest(print)
        expected = whole.parts["policy"].whole()
        backend.step(some_rows(), SUPERVISED)
        with pytest.raises(RankDiedError):
            store.save(RunState(2, 2, 0, ()), {"policy": backend.state_dict()})
    finally:
        ranks.close()
    found = CheckpointStore(tmp_path / "checkpoints", keep=2).load_newest(print)
    assert found.state.step == 1
    for name, tensor in found.parts["policy"].whole()["model"].items():
        assert torch.equal(tensor, expected["model"][name]), name
    # The next save takes the place of what was begun.
    one = TorchBackend(head_of("policy"), settings_of(), Schedule(1e-3, 0, 1, "constant"))
    again = CheckpointStore(tmp_path / "checkpoints", keep=2)
    again.save(RunState(2, 2, 0, ()), {"policy": one.state_dict()})
    assert again.load_newest(print).state.step == 2
