"""Checkpoints are whole, checked, and few."""

import json

import pytest
import torch

from trainer.checkpoint import CheckpointError, CheckpointStore, RunState, load_checkpoint


def parts_of(value: float) -> dict:
    return {"policy": {"weight": torch.full((3,), value)}}


def test_what_was_saved_comes_back(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    state = RunState(step=4, version=4, next_task=40, untrained=(32, 35))
    store.save(state, parts_of(1.5))
    loaded, parts = load_checkpoint(store.latest())
    assert loaded == state
    assert torch.equal(parts["policy"]["weight"], torch.full((3,), 1.5))


def test_only_the_newest_are_kept_and_latest_points_to_the_last(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    for step in (1, 2, 10):
        store.save(RunState(step, step, 0, ()), parts_of(step))
    assert sorted(folder.name for folder in tmp_path.glob("step_*")) == ["step_000002", "step_000010"]
    assert load_checkpoint(store.latest())[0].step == 10


def test_a_checkpoint_is_never_removed_for_a_higher_number_beside_it(tmp_path):
    for step in (80, 90):
        CheckpointStore(tmp_path, keep=2).save(RunState(step, step, 0, ()), parts_of(step))
    store = CheckpointStore(tmp_path, keep=2)
    for step in (1, 2, 3):
        store.save(RunState(step, step, 0, ()), parts_of(step))
        assert load_checkpoint(store.latest())[0].step == step
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
    assert torch.equal(load_checkpoint(store.latest())[1]["policy"]["weight"], torch.full((3,), 2.0))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_000005"]


def test_going_back_sets_later_checkpoints_aside(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    for step in (10, 20):
        store.save(RunState(step, step, 0, ()), parts_of(step))
    store.go_back_to(tmp_path / "step_000010", 10)
    assert load_checkpoint(store.latest())[0].step == 10
    store.save(RunState(15, 15, 0, ()), parts_of(15))
    store.save(RunState(25, 25, 0, ()), parts_of(25))
    assert sorted(folder.name for folder in tmp_path.glob("step_*")) == ["step_000015", "step_000025"]
    assert load_checkpoint(tmp_path / "aside_step_000020")[0].step == 20


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
    assert load_checkpoint(store.latest())[0].step == 1
    store.save(RunState(2, 2, 0, ()), parts_of(2.0))
    assert load_checkpoint(store.latest())[0].step == 2


def test_a_folder_without_a_manifest_is_no_checkpoint(tmp_path):
    (tmp_path / "state.json").write_text(json.dumps({}))
    with pytest.raises(CheckpointError, match="no checkpoint"):
        load_checkpoint(tmp_path)
