"""Checkpoints are whole, checked, and few."""

import json
import math
import resource
import shutil
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import rollgym.trainer.records.checkpoint
from rollgym.trainer.core.errors import CheckpointError
from rollgym.trainer.core.run_files import WriteError
from rollgym.trainer.records.checkpoint import CheckpointStore, RunState, kept_steps, load_checkpoint
from tests.support.kills import killed_at


def parts_of(value: float) -> dict:
    return {"policy": {"weight": torch.full((3,), value)}}


def test_what_was_saved_comes_back(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    state = RunState(4, 4, next_task=40, untrained=(32, 33, 35), aside=(35,), long_round=(33,))
    store.save(state, parts_of(1.5))
    loaded = load_checkpoint(store.latest())
    assert loaded.state == state
    assert torch.equal(loaded.parts["policy"]["weight"], torch.full((3,), 1.5))


def test_only_the_newest_are_kept_and_latest_points_to_the_last(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    for step in (1, 2, 10):
        store.save(RunState(step, step, 0, ()), parts_of(step))
    assert sorted(folder.name for folder in tmp_path.glob("step_*")) == ["step_000002", "step_000010"]
    assert load_checkpoint(store.latest()).state.step == 10


def test_a_checkpoint_is_never_removed_for_a_higher_number_beside_it(tmp_path):
    for step in (80, 90):
        CheckpointStore(tmp_path, keep=2).save(RunState(step, step, 0, ()), parts_of(step))
    store = CheckpointStore(tmp_path, keep=2)
    for step in (1, 2, 3):
        store.save(RunState(step, step, 0, ()), parts_of(step))
        assert load_checkpoint(store.latest()).state.step == step
    names = sorted(folder.name for folder in tmp_path.glob("step_*"))
    assert names == ["step_000002", "step_000003", "step_000080", "step_000090"]


def test_steps_are_numbers_not_names(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    for step in (999_998, 999_999, 1_000_000, 1_000_001):
        store.save(RunState(step, step, 0, ()), parts_of(step))
    assert sorted(folder.name for folder in tmp_path.glob("step_*")) == ["step_1000000", "step_1000001"]


def test_saving_a_step_again_replaces_it(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    for value in (1.0, 2.0):
        store.save(RunState(5, 5, 0, ()), parts_of(value))
    assert torch.equal(load_checkpoint(store.latest()).parts["policy"]["weight"], torch.full((3,), 2.0))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_000005"]


def test_going_back_sets_later_checkpoints_aside(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    for step in (10, 20):
        store.save(RunState(step, step, 0, ()), parts_of(step))
    store.go_back_to(tmp_path / "step_000010", 10)
    assert load_checkpoint(store.latest()).state.step == 10
    store.save(RunState(15, 15, 0, ()), parts_of(15))
    store.save(RunState(25, 25, 0, ()), parts_of(25))
    assert sorted(folder.name for folder in tmp_path.glob("step_*")) == ["step_000015", "step_000025"]
    assert load_checkpoint(tmp_path / "aside_step_000020").state.step == 20


def test_a_damaged_checkpoint_is_refused(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    folder = store.save(RunState(1, 1, 0, ()), parts_of(1.0))
    content = bytearray((folder / "policy.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (folder / "policy.pt").write_bytes(bytes(content))
    with pytest.raises(CheckpointError, match=r"policy\.pt is damaged"):
        load_checkpoint(folder)


def test_a_half_written_checkpoint_is_invisible(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    store.save(RunState(1, 1, 0, ()), parts_of(1.0))
    partial = tmp_path / ".step_000002.partial"
    partial.mkdir()
    (partial / "policy.pt").write_bytes(b"torn")
    assert load_checkpoint(store.latest()).state.step == 1
    store.save(RunState(2, 2, 0, ()), parts_of(2.0))
    assert load_checkpoint(store.latest()).state.step == 2


def test_a_folder_without_a_manifest_is_no_checkpoint(tmp_path):
    (tmp_path / "state.json").write_text(json.dumps({}))
    with pytest.raises(CheckpointError, match="no checkpoint"):
        load_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"there is no folder .*/nowhere"):
        load_checkpoint(tmp_path / "nowhere")


def written(directory: Path, *steps: int, keep: int = 2) -> CheckpointStore:
    """A store with checkpoints of these steps, whose weights are their numbers."""
    store = CheckpointStore(directory, keep)
    for step in steps:
        store.save(RunState(step, step, 0, ()), parts_of(step))
    return store


@pytest.mark.parametrize(
    ("steps", "keep", "work", "results"),
    [
        ([], 1, lambda store: store.save(RunState(1, 1, 0, ()), parts_of(1)), {None, 1.0}),
        ([1], 1, lambda store: store.save(RunState(1, 1, 0, ()), parts_of(7)), {1.0, 7.0}),
        ([1, 2], 2, lambda store: store.save(RunState(3, 3, 0, ()), parts_of(3)), {2.0, 3.0}),
        ([1, 2, 3], 3, lambda store: store.go_back_to(store._directory / "step_000001", 1), {3.0, 1.0}),
    ],
    ids=["first", "replaced", "oldest removed", "back"],
)
def test_a_kill_at_any_point_leaves_a_whole_newest_checkpoint(
    tmp_path: Path, steps: list[int], keep: int, work: Callable, results: set[float | None]
):
    written(tmp_path / "before", *steps, keep=keep)
    (tmp_path / "before").mkdir(exist_ok=True)
    found = set()
    for point in count():
        directory = tmp_path / "after"
        shutil.copytree(tmp_path / "before", directory)
        store = CheckpointStore(directory, keep)
        killed = killed_at(point, lambda store=store: work(store))
        said: list[str] = []
        newest = store.load_newest(said.append)
        assert said == []
        found.add(None if newest is None else float(newest.parts["policy"]["weight"][0]))
        if point % 4 == 0:
            store.save(RunState(9, 9, 0, ()), parts_of(9.0))
            assert load_checkpoint(store.latest()).state.step == 9
            assert not list(directory.glob(".step_*.partial")), "what was half there goes"
        shutil.rmtree(directory)
        if not killed:
            break
    assert point >= 8, "the work was cut off at each of its operations"
    assert found == results


def damage(path: Path) -> None:
    path.write_bytes(b"\0" * len(path.read_bytes()))


def test_damaged_checkpoints_are_passed_over_and_named(tmp_path):
    store = written(tmp_path, 1, 2, 3, keep=3)
    damage(tmp_path / "step_000003" / "policy.pt")
    shutil.rmtree(tmp_path / "step_000002")
    said: list[str] = []
    assert store.load_newest(said.append).state.step == 1
    assert len(said) == 1
    assert "step_000003/policy.pt is damaged or missing" in said[0]
    shutil.rmtree(tmp_path / "step_000003")
    assert store.load_newest(said.append).state.step == 1
    assert said[1] == f"passing over a checkpoint: {tmp_path}/step_000003 is missing"


def test_where_no_checkpoint_can_be_read_nothing_begins_anew(tmp_path):
    store = written(tmp_path, 1, 2)
    for step in (1, 2):
        damage(tmp_path / f"step_00000{step}" / "manifest.json")
    with pytest.raises(
        CheckpointError, match=r"can be read .*step_000002/manifest\.json is damaged.*bring one back"
    ):
        store.load_newest(lambda _: None)


def test_a_pointer_that_nobody_can_read_is_no_matter(tmp_path):
    store = written(tmp_path, 1, 2)
    for garbage in (b"", b"\xff\xfe\x00", b"step_", b"../elsewhere", b"step_12x"):
        (tmp_path / "latest").write_bytes(garbage)
        assert store.load_newest(lambda _: None).state.step == 2


@pytest.mark.parametrize(
    "garbage",
    [
        "",
        "not JSON",
        "[]",
        "null",
        "{}",
        '{"policy.pt": "00"}',
        '{"state.json": 3}',
        '{"state.json": "00", "../x": "00"}',
        "[" * 100_000,
        '{"a": ' * 100_000,
        "\udcff",
    ],
    ids=range(11),
)
def test_a_manifest_of_garbage_is_a_clear_error(tmp_path, garbage):
    written(tmp_path, 1)
    folder = tmp_path / "step_000001"
    (folder / "manifest.json").write_bytes(garbage.encode(errors="surrogateescape"))
    with pytest.raises(CheckpointError, match="is damaged"):
        load_checkpoint(folder)


@pytest.mark.parametrize(
    "state", ["{}", "[]", '{"step": -1, "version": 0, "next_task": 0, "untrained": []}', "0"]
)
def test_a_state_of_garbage_is_a_clear_error(tmp_path, state):
    written(tmp_path, 1)
    folder = tmp_path / "step_000001"
    (folder / "state.json").write_text(state)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["state.json"] = rollgym.trainer.records.checkpoint._hash(folder / "state.json")
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="does not say where the run stands"):
        load_checkpoint(folder)


@pytest.fixture
def little_room():
    """Files of this process cannot grow beyond a few kilobytes, as on a disk that is full."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_is_named_and_the_checkpoint_before_stays(tmp_path, little_room):
    store = written(tmp_path, 1)
    large = {"policy": {"weight": torch.zeros(100_000)}}
    with pytest.raises(WriteError, match=r"cannot write .*\.step_000002\.partial.*: File too large"):
        store.save(RunState(2, 2, 0, ()), large)
    assert store.load_newest(lambda _: None).state.step == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_000001"], "no room is taken"


@given(
    st.sets(st.integers(0, 60)),
    st.dictionaries(st.integers(0, 60), st.floats() | st.sampled_from([0.0, 1.0]), max_size=60),
    st.integers(1, 4),
    st.integers(0, 4),
    st.sampled_from(["highest", "lowest"]),
)
def test_the_newest_and_the_best_stay(steps, scores, keep, keep_best, best_is):
    kept = kept_steps(steps, scores, keep, keep_best, best_is)
    assert kept <= steps
    gone = steps - kept
    assert len(kept) >= min(len(steps), keep)
    assert len(kept) <= keep + keep_best
    newest = sorted(steps)[-keep:]
    assert set(newest) <= kept
    finite = {step for step in steps if math.isfinite(scores.get(step, math.nan))}
    better = (lambda one, other: one > other) if best_is == "highest" else (lambda one, other: one < other)
    for step in gone & finite:
        ahead = [
            each
            for each in finite
            if better(scores[each], scores[step]) or (scores[each] == scores[step] and each > step)
        ]
        assert len(ahead) >= keep_best, "nothing is removed that is among the best"
    assert len((kept & finite) - set(newest)) <= keep_best
    assert kept - set(newest) <= finite, "what is old and has no score goes"


def test_the_best_checkpoint_outlives_newer_ones(tmp_path):
    store = CheckpointStore(tmp_path, keep=1, keep_best=1)
    scores = {10: 0.2, 20: 0.9, 30: 0.4, 50: 0.1}
    for step in (10, 20, 30, 40, 50):
        store.save(RunState(step, step, 0, ()), parts_of(step), scores)
    assert sorted(folder.name for folder in tmp_path.glob("step_*")) == ["step_000020", "step_000050"]
    assert load_checkpoint(store.latest()).state.step == 50


class InFiles:
    """A part of a checkpoint that writes itself, in two files."""

    def __init__(self, content: str, broken: bool = False) -> None:
        self._content, self._broken = content, broken

    def write(self, folder: Path) -> None:
        (folder / ".metadata").write_text(self._content)
        if self._broken:
            raise RuntimeError("a rank is gone")
        (folder / "piece").write_text(self._content)


def test_a_part_in_files_is_whole_or_not_there(tmp_path):
    (tmp_path / "run").mkdir()
    store = CheckpointStore(tmp_path / "run" / ".." / "checkpoints", keep=2)
    store.save(RunState(1, 1, 0, ()), {"policy": InFiles("a")})
    with pytest.raises(RuntimeError, match="a rank is gone"):
        store.save(RunState(2, 2, 0, ()), {"policy": InFiles("b", broken=True)})
    loaded = load_checkpoint(store.latest())
    assert loaded.state.step == 1
    assert (loaded.parts["policy"].folder / "piece").read_text() == "a"
    for name in ("piece", ".metadata"):
        copy = shutil.copytree(loaded.folder, tmp_path / name)
        (copy / "policy" / name).write_text("c")
        with pytest.raises(CheckpointError, match=rf"{name} is damaged or missing"):
            load_checkpoint(copy)


@pytest.mark.slow
def test_a_kill_while_a_part_in_files_is_written_leaves_the_one_before(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    store.save(RunState(1, 1, 0, ()), {"policy": InFiles("a")})
    for point in count():
        killed = killed_at(point, lambda: store.save(RunState(2, 2, 0, ()), {"policy": InFiles("b")}))
        loaded = store.load_newest(print)
        assert loaded is not None
        assert (loaded.parts["policy"].folder / "piece").read_text() == {1: "a", 2: "b"}[loaded.state.step]
        if not killed:
            assert loaded.state.step == 2
            break


def test_a_disk_that_does_not_take_the_going_back_is_named(tmp_path):
    store = written(tmp_path, 1, 2)
    (tmp_path / ".latest.partial").mkdir()
    with pytest.raises(WriteError, match=r"cannot write .*\.latest\.partial: Is a directory"):
        store.go_back_to(tmp_path / "step_000001", 1)
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").mkdir()
    with pytest.raises(WriteError, match=r"cannot write .*latest"):
        store.set_all_aside()
