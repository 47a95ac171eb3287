"""The rollout log: whole entries survive whatever kills their process, and nothing else is believed."""

import asyncio
import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollgym.trainer.core.run_files import WriteError
from rollgym.trainer.records.rollout_log import Entry, EpisodeKey, RolloutLog
from tests.support.kills import killed_at


def log_of(folder: Path, said: list[str] | None = None, *, durable: bool = False) -> RolloutLog:
    return RolloutLog(folder, durable=durable, say=(said if said is not None else []).append)


def entry(task: int, *fields: object) -> Entry:
    return Entry("reply", EpisodeKey(task, 1, 0), fields)


def write(folder: Path, *entries: Entry) -> Path:
    log = log_of(folder)
    for each in entries:
        log.append(each)
    log.close()
    return max(folder.glob("*.log"))


def test_what_is_appended_is_read_back_by_whoever_comes_next(tmp_path):
    first = [entry(0, b"\x00\xff", 0.1 + 0.2, "half \ud800", None), entry(1, [[3, 2]], {"a": [True]})]
    write(tmp_path / "log", *first)
    second = [entry(2, "later")]
    write(tmp_path / "log", *second)
    assert list(log_of(tmp_path / "log").read()) == first + second
    assert list(log_of(tmp_path / "none").read()) == []


def test_an_entry_is_with_the_operating_system_when_append_returns(tmp_path):
    log = log_of(tmp_path)
    log.append(entry(0, "now"))
    assert list(log_of(tmp_path).read()) == [entry(0, "now")], "nothing waits in this process's memory"
    log.close()


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_torn_last_entry_is_passed_over_without_a_word(tmp_path, cut):
    entries = [entry(0, "whole"), entry(1, "x" * 40)]
    path = write(tmp_path, *entries)
    os.truncate(path, path.stat().st_size - cut)
    said: list[str] = []
    assert list(log_of(tmp_path, said).read()) == entries[:1]
    assert said == []


@given(place=st.integers(0, 200), value=st.integers(1, 255))
def test_damage_costs_what_is_behind_it_and_is_told(tmp_path_factory, place, value):
    entries = [entry(task, "x" * 40) for task in range(3)]
    folder = tmp_path_factory.mktemp("log")
    path = write(folder, *entries)
    content = bytearray(path.read_bytes())
    place %= len(content)
    content[place] ^= value
    path.write_bytes(content)
    said: list[str] = []
    found = list(log_of(folder, said).read())
    assert found == entries[: len(found)]
    assert len(found) < 3
    # A length that points behind the end looks like an entry that was not written to its end.
    assert len(said) <= 1


def test_a_file_of_nobodys_is_not_read(tmp_path):
    (tmp_path / "000001.log").write_bytes(b"something else\n" * 10)
    (tmp_path / "notes.log").write_bytes(b"")
    (tmp_path / "000002.log").write_bytes(b"rollgym roll")  # killed while it was begun
    said: list[str] = []
    assert list(log_of(tmp_path, said).read()) == []
    assert len(said) == 1
    assert "is no rollout log of this release" in said[0]


def test_files_go_when_a_checkpoint_holds_all_their_tasks(tmp_path):
    log = log_of(tmp_path)
    log.append(entry(0, "a"))
    log.append(entry(1, "b"))
    log.settle(2, untrained=[1])()
    log.append(entry(2, "c"))
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["000001.log", "000002.log"]
    log.settle(3, untrained=[2])()
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["000002.log"], (
        "task 1 was settled, 2 was not"
    )
    log.settle(3, untrained=[])()
    assert list(tmp_path.iterdir()) == []
    log.append(entry(3, "d"))
    log.close()
    again = log_of(tmp_path)
    again.settle(4, untrained=[])()
    assert list(again.read()) == [], "settled by a checkpoint whose process was killed before it could delete"
    again.settle(5, untrained=[])()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_told_and_leaves_whole_entries(tmp_path, monkeypatch):
    log = log_of(tmp_path)
    log.append(entry(0, "whole"))
    real = os.write

    def full(descriptor: int, content: bytes) -> int:
        if len(content) > 10:
            return real(descriptor, content[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(
            WriteError, match=r"cannot write .*000001\.log: No space left on device: free space"
        ):
            log.append(entry(1, "x" * 15))
    log.append(entry(2, "there is room again"))
    log.close()
    assert list(log_of(tmp_path).read()) == [entry(0, "whole"), entry(2, "there is room again")]


def test_one_sync_serves_all_that_wait_for_it(tmp_path, monkeypatch):
    synced: list[int] = []
    real = os.fdatasync

    def counting(descriptor: int) -> None:
        synced.append(descriptor)
        real(descriptor)

    monkeypatch.setattr(os, "fdatasync", counting)

    async def play(log: RolloutLog, task: int) -> None:
        log.append(entry(task, "x"))
        await log.commit()

    async def many(log: RolloutLog) -> None:
        await asyncio.gather(*(play(log, task) for task in range(50)))

    durable, quick = log_of(tmp_path / "durable", durable=True), log_of(tmp_path / "quick")
    asyncio.run(many(durable))
    assert 1 <= len(synced) < 5
    synced.clear()
    asyncio.run(many(quick))
    assert synced == []
    durable.close()
    quick.close()
    assert len(list(log_of(tmp_path / "durable").read())) == 50


def test_a_failing_disk_ends_who_waits_for_it(tmp_path, monkeypatch):
    def failing(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    log = log_of(tmp_path, durable=True)
    log.append(entry(0, "x"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", failing)
        with pytest.raises(WriteError, match="Input/output error"):
            asyncio.run(log.commit())
    log.close()


def test_a_kill_at_any_point_leaves_what_was_appended_before(tmp_path):
    entries = [entry(task, "x" * 10) for task in range(4)]

    def work(folder: Path) -> None:
        log = log_of(folder, durable=True)
        for number, each in enumerate(entries):
            log.append(each)
            (folder / f"appended_{number}").touch()
            if number == 1:
                log.settle(1, untrained=[])()
        log.settle(4, untrained=[3])()

    for point in range(200):
        folder = tmp_path / str(point)
        killed = killed_at(point, lambda folder=folder: work(folder))
        appended = len(list(folder.glob("appended_*")))
        found = {each.key.task for each in log_of(folder).read()}
        kept = {task for task in range(appended) if task >= 1} - ({1, 2} if appended == 4 else set())
        assert kept <= found, f"killed at operation {point}"
        if not killed:
            break
    assert point > 10


@pytest.mark.parametrize("goes_on", [False, True], ids=["closed", "another file"])
def test_who_waits_for_the_disk_while_a_checkpoint_lets_go_of_the_file(tmp_path, monkeypatch, goes_on):
    synced: list[int] = []
    for name in ("fsync", "fdatasync"):
        real = getattr(os, name)

        def noting(descriptor: int, real=real) -> None:
            synced.append(os.fstat(descriptor).st_ino)
            real(descriptor)

        monkeypatch.setattr(os, name, noting)

    async def two_replies(log: RolloutLog) -> None:
        log.append(entry(0, "first"))
        first = asyncio.create_task(log.commit())
        await asyncio.sleep(0)
        log.append(entry(1, "second"))
        second = asyncio.create_task(log.commit())
        await asyncio.sleep(0)  # it waits for the sync that the first has begun
        file = (tmp_path / "000001.log").stat().st_ino
        finish = log.settle(1, untrained=[])
        if goes_on:
            log.append(entry(2, "third"))
        await asyncio.gather(first, second)
        assert synced.count(file) == 2, "the second entry is on the disk, too"
        finish()

    log = log_of(tmp_path, durable=True)
    asyncio.run(two_replies(log))
    log.close()
    found = [each.fields for each in log_of(tmp_path).read()]
    assert found == [("first",), ("second",), *([("third",)] if goes_on else [])]
