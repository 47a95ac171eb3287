"""The account of tasks stays exact through crashes."""

import pytest

from rollgym.trainer.config.run import TrackingSettings
from rollgym.trainer.core.run_files import DamagedFileError, LineFile, read_lines
from rollgym.trainer.learn.tracking import RECORD_FILES, Tracker
from rollgym.trainer.records.ledger import Ledger, TaskEvent

DAMAGED = [
    b"\xff\x00",
    b"nothing",
    b"[]",
    b"3",
    b"null",
    b"{}",
    b'{"step": "x", "task": "x"}',
    b"[" * 100_000,
]


def test_the_last_event_is_the_fate(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    for index in range(4):
        ledger.issued(index, version=0)
    ledger.trained([0, 1], step=0)
    ledger.dropped(2, "zero variance")
    assert [ledger.fate(index) for index in range(5)] == [
        TaskEvent.TRAINED,
        TaskEvent.TRAINED,
        TaskEvent.DROPPED,
        TaskEvent.ISSUED,
        None,
    ]
    assert ledger.counts()["trained"] == 2
    assert ledger.counts()["dropped/zero variance"] == 1


def test_roll_back_voids_what_the_checkpoint_had_not_seen(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    for index in range(6):
        ledger.issued(index, version=index // 2)
    ledger.trained([0, 1], step=0)
    # The checkpoint stands here: tasks 2 and 3 are admitted and untrained, 4 is the next.
    ledger.trained([2], step=1)
    ledger.dropped(3, "failed")
    ledger.trained([4, 5], step=2)
    ledger.close()

    again = Ledger(path)
    assert again.roll_back(next_index=4, step=1, untrained=[2, 3]) == [2, 3, 4, 5]
    assert again.fate(1) is TaskEvent.TRAINED
    assert {again.fate(index) for index in (2, 3, 4, 5)} == {TaskEvent.REISSUED}
    assert again.counts()["reissues"] == 4
    assert "dropped/failed" not in again.counts()


def test_a_torn_last_line_is_cut(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    ledger.issued(0, version=0)
    ledger.close()
    with path.open("a") as file:
        file.write('{"task": 1, "fa')
    reopened = Ledger(path)
    reopened.issued(5, version=1)
    reopened.close()
    assert [event["task"] for event in read_lines(path)] == [0, 5]


@pytest.mark.parametrize("line", [*DAMAGED, b'{"task": 1, "fate": "lost"}', b'{"task": 1}'])
def test_a_damaged_ledger_is_named_with_its_line(tmp_path, line):
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(b'{"task": 0, "fate": "issued", "version": 0}\n' + line + b"\n")
    with pytest.raises(DamagedFileError, match=r"ledger.jsonl is damaged in line 2: .*move the file away"):
        Ledger(path)


@pytest.mark.parametrize("name", RECORD_FILES)
@pytest.mark.parametrize("line", DAMAGED)
def test_so_are_damaged_records(tmp_path, name, line):
    (tmp_path / name).write_bytes(b'{"step": 0}\n' + line + b"\n")
    settings = TrackingSettings(tensorboard=False, episodes=True, digests=True)
    with pytest.raises(DamagedFileError, match=f"{name} is damaged in line 2: "):
        Tracker(tmp_path, settings, resume_step=5)


def test_any_text_goes_into_a_line_and_comes_back(tmp_path):
    text = "half a pair \ud800, line ends \u2028 \x85 \n \x0c"
    file = LineFile(tmp_path / "lines.jsonl")
    file.write({"reply": text})
    file.close()
    assert read_lines(tmp_path / "lines.jsonl") == [{"reply": text}]
