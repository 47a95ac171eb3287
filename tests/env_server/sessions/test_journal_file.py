"""The journal's file: what is written is read again, whatever happens to its end; and what is over makes room."""

import itertools
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollgym.env_server.sessions import journal_file
from rollgym.env_server.sessions.journal import EndedStep
from rollgym.env_server.sessions.journal_file import JournalError, JournalFile
from rollgym.env_server.sessions.journal_framing import framed
from tests.support.journals import (
    COMMON,
    FILE_HEAD,
    FLOAT,
    HEAD,
    NUMBER,
    OPTIONS,
    PLAIN,
    SEED,
    STEP,
    TEXT,
    Writer,
    killed_before,
    look,
    look_at,
    offsets,
    opened,
    read,
    refound,
    writing,
)
from tests.support.processes import ROOT, running

WHICH = st.integers(0, 5)
BEFORE = st.none() | st.builds(
    EndedStep, NUMBER, NUMBER, PLAIN, PLAIN, FLOAT, st.booleans(), st.booleans(), PLAIN
)
HAPPENING = st.one_of(
    st.tuples(st.just("opened"), WHICH, OPTIONS, st.lists(STEP, max_size=3)),
    st.tuples(st.just("began"), WHICH, SEED, OPTIONS, PLAIN, BEFORE, st.none() | TEXT),
    st.tuples(st.just("stepped"), WHICH, STEP),
    st.tuples(st.just("stepped"), WHICH, STEP),
    st.tuples(st.just("closed"), WHICH),
)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is mapped anew and compacted all the time."""
    monkeypatch.setattr(journal_file, "_GROWTH", 1)
    monkeypatch.setattr(journal_file, "_SLACK", 0)


def test_a_directory_that_is_taken_away_costs_the_journal_and_not_the_step(
    small: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As those do who clear directories of what has not been changed for days."""
    directory = tmp_path / "state"
    directory.mkdir()
    writer = Writer(directory / "journal-0.bin")
    session_id = writer.open(steps=[("go", "there", 1.0, False, False)])
    shutil.rmtree(directory)
    for _ in range(3):
        writer.step(session_id)
    assert not writer.file.is_kept
    assert "no journals from here on" in caplog.text
    writer.file.close()


@COMMON
@given(happenings=st.lists(HAPPENING, max_size=25))
def test_what_is_written_is_read(happenings: list[Any]) -> None:
    with writing() as writer:
        for happening in happenings:
            writer.happen(*happening)
        assert read(writer.content) == writer.history[-1]
        size = writer.file.size
        assert writer.content[size:].strip(b"\0") == b""
        assert offsets(writer.content)[-1] == size
        writer.file.close()
        assert len(writer.content) == size, "what is let go of is as long as its records"
        writer.file = JournalFile(writer.path)
        assert look_at(writer.file) == writer.history[-1]


@COMMON
@given(happenings=st.lists(HAPPENING, max_size=25))
def test_compaction_changes_nothing_that_matters(small: None, happenings: list[Any]) -> None:
    with writing() as writer:
        for happening in happenings:
            writer.happen(*happening)
            assert read(writer.content) == writer.history[-1]
        for session_id in list(writer.journals):
            writer.close(session_id)
        assert writer.file.size == FILE_HEAD, "nothing is left of what is over"


LAST: dict[str, Callable[[Writer, str], Any]] = {
    "opened": lambda writer, session_id: writer.open({"a": 1}),
    "began": lambda writer, session_id: writer.begin(session_id, 9, {"b": 2}, "anew"),
    "returned": lambda writer, session_id: writer.step(session_id),
    "stepped": lambda writer, session_id: writer.step(session_id, ([1], {"x": [0.5]}, 1.0, True, False)),
    "closed": lambda writer, session_id: writer.close(session_id),
}


@pytest.mark.parametrize("kind", LAST)
def test_a_last_record_that_is_not_whole_did_not_happen(kind: str) -> None:
    with writing() as writer:
        session_id, other = writer.open(), writer.open({"other": True})
        writer.begin(session_id)
        writer.begin(other)
        writer.step(session_id)
        writer.step(other)
        start = writer.file.size
        before = writer.history[-1]
        LAST[kind](writer, session_id)
        after, content, end = writer.history[-1], writer.content, writer.file.size
        assert end > start
        assert before != after
        killed = killed_before(content, start)
        for cut in range(start, end):
            # In the mapping, what was not copied yet is zero; the last bytes may be.
            if content[cut:end].strip(b"\0"):
                assert refound(killed[:cut] + bytes(len(content) - cut))[::2] == (before, 0), cut
        assert refound(killed)[::2] == (after, 0), "the head alone does not say it yet"
        assert read(content[:end]) == read(content) == after


@COMMON
@given(happenings=st.lists(HAPPENING, min_size=1, max_size=12), data=st.data())
def test_bytes_that_changed_are_noticed(happenings: list[Any], data: st.DataObject) -> None:
    with writing() as writer:
        for happening in happenings:
            writer.happen(*happening)
        content = writer.content[: writer.file.size]
        at = data.draw(st.integers(FILE_HEAD - 20, max(FILE_HEAD, len(content) - 1)))
        junk = data.draw(st.binary(min_size=1, max_size=6))
        changed = content[:at] + junk + content[at + len(junk) :]
        found, _, damage = refound(changed)
        if changed[: len(content)] == content:
            assert (found, damage) == (writer.history[-1], 0)
        else:
            assert damage or len(content) == FILE_HEAD
            assert no_older(found, writer), "what is not lost is as it was last"


def no_older(found: dict[str, Any], writer: Writer) -> bool:
    """Whether sessions are as they were last, and none is one that was closed."""
    return found.items() <= writer.history[-1].items()


def flip(content: bytes, random: Random) -> bytes:
    at = random.randrange(FILE_HEAD - 20, len(content))
    return content[:at] + bytes([content[at] ^ 1 << random.randrange(8)]) + content[at + 1 :]


def cut_off(content: bytes, random: Random) -> bytes:
    return content[: random.randrange(FILE_HEAD, len(content))]


def lose_a_page(content: bytes, random: Random) -> bytes:
    """What a loss of power leaves of a mapped file; its pages are smaller here, and the first one may be older."""
    at = 512 * random.randrange(1, len(content) // 512)
    return content[:at] + bytes(512) + content[at + 512 :]


def lose_the_end_and_the_head(content: bytes, random: Random) -> bytes:
    """The head has not come to the disk, and neither has a page before the last one."""
    return killed_before(lose_a_page(content, random), FILE_HEAD)


def in_pieces(content: bytes) -> list[bytes]:
    ends = offsets(content)
    return [content[start:end] for start, end in itertools.pairwise([0, *ends])]


def miss_a_record(content: bytes, random: Random) -> bytes:
    pieces = in_pieces(content)
    del pieces[random.randrange(1, len(pieces))]
    return b"".join(pieces)


def double_a_record(content: bytes, random: Random) -> bytes:
    pieces = in_pieces(content)
    pieces.insert(random.randrange(1, len(pieces)), random.choice(pieces[1:]))
    return b"".join(pieces)


def swap_records(content: bytes, random: Random) -> bytes:
    pieces = in_pieces(content)
    one, other = random.sample(range(1, len(pieces)), 2)
    pieces[one], pieces[other] = pieces[other], pieces[one]
    return b"".join(pieces)


DAMAGES = (
    flip,
    cut_off,
    lose_a_page,
    lose_the_end_and_the_head,
    miss_a_record,
    double_a_record,
    swap_records,
)
# Two hundred, where there is time for them.
EACH = int(os.environ.get("DAMAGED_JOURNALS", "42")) // len(DAMAGES)


@pytest.mark.parametrize("damage", DAMAGES)
def test_no_session_goes_back_in_a_damaged_journal(damage: Callable[[bytes, Random], bytes]) -> None:
    for seed in range(EACH):
        random = Random(seed)
        with writing() as writer:
            sessions = [writer.open({"number": number}) for number in range(6)]
            for session_id in sessions:
                writer.begin(session_id)
            for number in range(180):
                session_id = sessions[number % 6]
                if session_id == sessions[0] and number >= 90:
                    continue
                writer.step(session_id, (f"{number}", {"at": number}, 0.5, False, False))
                if number == 84:
                    writer.close(sessions[0])
                if random.random() < 0.02:
                    writer.begin(session_id, random.randrange(100))
            content = writer.content[: writer.file.size]
            damaged = damage(content, random)
            found, ended, places = refound(damaged)
            if damaged == content:
                continue
            assert places, seed
            assert no_older(found, writer), seed
            assert found.keys().isdisjoint(ended)
            assert ended.get(sessions[0], "closed") in ("closed", "lost")


def test_sessions_that_went_on_after_the_damage_go_on() -> None:
    with writing() as writer:
        one, other, third = writer.open(), writer.open(), writer.open()
        for session_id in (one, other, third):
            writer.begin(session_id)
        start = writer.file.size
        writer.step(one)
        writer.step(one)
        after = writer.file.size
        writer.begin(one)
        writer.step(other)
        content = writer.content
        damaged = content[: start + 20] + b"\1" + content[start + 21 : after] + content[after:]
        found, ended, places = refound(damaged)
        assert places == 1
        # The third one may have been closed, or have taken a step, as far as can be known.
        assert found == {each: writer.history[-1][each] for each in (one, other)}
        assert ended == {third: "lost"}


def test_what_clients_say_is_no_record() -> None:
    with writing() as writer:
        victim = writer.open()
        writer.begin(victim)
        closing = in_pieces(writer.content)[-1]
        session_id = writer.open()
        writer.begin(session_id, options={"text": "x" * 100})
        # Whole records, as another file would have them.
        with writing() as others:
            others.open()
            others.close(others.open())
            forged = b"".join(in_pieces(others.content)[1:]) + closing[:4]
        writer.step(session_id, (forged.decode("latin-1"), 1, 0.0, False, False))
        at = offsets(writer.content)[-2] + HEAD.size + 3
        content = writer.content
        found, ended, places = refound(content[:at] + b"\xff" + content[at + 1 :])
        assert (found, ended, places) == ({}, {victim: "lost", session_id: "lost"}, 1)


def test_records_of_unknown_sessions_and_without_sense_are_damage(caplog: pytest.LogCaptureFixture) -> None:
    with writing() as writer:
        session_id = writer.open()
        writer.begin(session_id)
        content = writer.content[: writer.file.size]
        mark = content[8:12]
        for odd in ((2, 77, 0, 0, "a", "b", 0.0, False, False), (0, 9), "text", (3, []), (1, 0, None)):
            record = framed(mark, 2, msgpack.packb(odd))
            found, ended, places = refound(content + record)
            assert places, odd
            assert (found, ended) == ({}, {session_id: "lost"})
    assert "lacks something at 1 places: 1 sessions are lost" in caplog.text


@pytest.mark.parametrize(
    "junk", [b"\xff" * 64, bytes(16) + b"x", HEAD.pack(b"none", 2**32 - 1, 0, 0), b"\x01"]
)
def test_what_follows_the_records_is_not_read(junk: bytes) -> None:
    with writing() as writer:
        writer.begin(writer.open())
        assert read(writer.content[: writer.file.size] + junk) == writer.history[-1]


def test_a_file_grows_over_its_mapping() -> None:
    with writing() as writer:
        session_id = writer.open()
        writer.begin(session_id)
        for number in range(30):
            writer.step(session_id, (f"{number} " * 50_000, number, 0.5, False, False))
        assert writer.file.size > 3_000_000
        assert read(writer.content) == writer.history[-1]


def test_a_compacted_file_is_small_and_goes_on() -> None:
    large = "x" * 100_000
    with writing() as writer:
        kept, resetting = writer.open({"kept": True}), writer.open()
        writer.begin(kept, 3)
        writer.step(kept)
        for _ in range(30):
            closed = writer.open()
            writer.begin(closed, options={"large": large})
            writer.step(kept)
            writer.begin(resetting, options={"large": large})
            writer.close(closed)
        assert writer.file.size < 3_000_000, "of six million bytes"
        writer.step(kept, ("after", "that", 0.0, True, False))
        found = read(writer.content)
        assert found == writer.history[-1]
        assert set(found) == {kept, resetting}
        assert len(found[kept]["actions"]) == 32
        assert found[kept]["ended"] == (True, False)
        assert found[resetting]["session"][-1] == 29


def test_a_compaction_that_did_not_finish_is_not_noticed() -> None:
    with writing() as writer:
        writer.begin(writer.open())
        writer.file.close()
        writer.path.with_suffix(".new").write_bytes(b"RGJRNL04 and then the process was killed")
        writer.file = JournalFile(writer.path)
        assert look_at(writer.file) == writer.history[-1]
        assert not writer.path.with_suffix(".new").exists()


def test_a_compaction_that_fails_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    with writing() as writer:
        kept, changing = writer.open({"kept": True}), writer.open()
        writer.close(writer.open())
        writer.begin(kept)
        in_the_way = writer.path.with_suffix(".new")
        in_the_way.mkdir()
        while writer.file.size < 5_000_000:
            writer.step(kept)
            writer.begin(changing, options={"large": "x" * 100_000})
            writer.step(changing)
        assert "cannot be made smaller" in caplog.text
        assert read(writer.content) == writer.history[-1], "it is as good as before"
        in_the_way.rmdir()
        while writer.file.size > 2_500_000:
            writer.step(kept)
            writer.begin(changing, options={"large": "x" * 100_000})
            assert writer.file.size < 20_000_000
        writer.step(kept)
        assert read(writer.content) == writer.history[-1]


def test_sessions_that_are_not_known_are_no_matter() -> None:
    with writing() as writer:
        writer.file.began("0.other", 0)
        writer.file.stepped("0.other")
        writer.file.closed("0.other", "closed")
        assert read(writer.content) == {}


def test_a_file_is_one_process_and_one_users() -> None:
    with writing() as writer:
        assert writer.path.stat().st_mode & 0o777 == 0o600
        assert writer.path.with_suffix(".lock").stat().st_mode & 0o777 == 0o600
        writer.begin(writer.open())
        with pytest.raises(JournalError, match="another server uses"):
            JournalFile(writer.path)
        assert read(writer.content) == writer.history[-1]
        writer.file.close()
        writer.file = JournalFile(writer.path)


@pytest.mark.parametrize("content", [b"x", b"something else", b"RGJRNL99", b"RGJRNL0"])
def test_what_is_no_journal_is_refused_and_kept(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "journal-0.bin"
    path.write_bytes(content)
    for _ in range(2):
        with pytest.raises(JournalError, match="is not a journal"):
            JournalFile(path)
    assert path.read_bytes() == content


def test_an_empty_file_is_an_empty_journal(tmp_path: Path) -> None:
    (tmp_path / "journal-0.bin").touch()
    with opened(tmp_path / "journal-0.bin") as file:
        assert file.sessions == []


def test_a_place_that_cannot_be_used_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="cannot use the journal"):
        JournalFile(tmp_path / "nowhere" / "journal-0.bin")
    (tmp_path / "journal-1.bin").mkdir()
    with pytest.raises(JournalError, match="cannot use the journal"):
        JournalFile(tmp_path / "journal-1.bin")


# -- other processes ---------------------------------------------------------------------------------------------

WRITER = """
import os
import sys
from pathlib import Path
from tests.support.journals import Writer

writer = Writer(Path(sys.argv[1]))
kept, changing = writer.open(), writer.open()
writer.begin(kept)
"""
STEPS = """
number = 0
while True:
    writer.step(kept, (f"action {number}", number, 0.5, False, False))
    number += 1
    print(number, flush=True)
"""
FULL = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (4_000_000, 4_000_000))
for number in range(100):
    writer.step(kept, ("x" * 100_000, "", 0.0, False, False))
assert not writer.path.exists(), "what cannot be kept up to date is not kept"
writer.begin(changing)
writer.step(kept)
assert not writer.path.exists()
print("full", flush=True)
if sys.stdin.read():
    os._exit(9)
writer.close(kept)
writer.file.close()
assert writer.path.exists(), "there is room for what is left"
"""


def start(code: str, path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER + code, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


def test_what_was_written_outlives_the_process(tmp_path: Path) -> None:
    path = tmp_path / "journal-0.bin"
    with running(start(STEPS, path)) as process:
        assert process.stdout is not None
        for _ in range(200):
            written = int(process.stdout.readline())
        with pytest.raises(JournalError):
            JournalFile(path)
        process.kill()
    with opened(path) as file:
        actions = next(look(session)["actions"] for session in file.sessions if session.episode == 0)
    assert len(actions) >= written == 200
    assert actions == [f"action {number}" for number in range(len(actions))]


def test_a_full_disk_costs_the_journal_and_not_the_server(tmp_path: Path) -> None:
    path = tmp_path / "journal-0.bin"
    with running(start(FULL, path)) as process:
        _, errors = process.communicate("", timeout=60)
    assert process.returncode == 0, errors
    assert "no journals from here on" in errors
    with opened(path) as file:
        assert [session.episode for session in file.sessions] == [0], "the one that was small enough"
        assert file.damage == 0
    assert not path.with_suffix(".stale").exists()


def test_who_is_killed_while_the_disk_is_full_leaves_word_of_what_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "journal-0.bin"
    with running(start(FULL, path)) as process:
        process.communicate("die", timeout=60)
    assert process.returncode == 9
    with opened(path) as file:
        assert file.sessions == []
        assert [reason for _, _, reason in file.ended] == ["lost", "lost"]
        assert file.damage
    assert not path.with_suffix(".stale").exists()


def test_a_disk_that_has_room_again_is_used_again(
    small: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = Writer(tmp_path / "journal-0.bin")
    session_id, closed = writer.open(), writer.open()
    writer.begin(session_id)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, hard))
    try:
        writer.step(session_id)
        writer.file.resume()
        assert not writer.file.is_kept
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    writer.file.resume()
    assert not writer.file.is_kept, "it is not looked for all the time"
    writer.file._retry_at = 0.0
    writer.close(closed)
    assert writer.file.is_kept
    opened_later = writer.open()
    writer.step(session_id)
    assert read(writer.content) == writer.history[-1]
    assert writer.history[-1].keys() == {session_id, opened_later}
    assert "journals are kept again" in caplog.text
    writer.file.close()
