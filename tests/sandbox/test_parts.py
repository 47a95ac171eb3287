"""The small parts: messages, files, outcomes, and the first process of a run."""

import contextlib
import os
import signal
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollgym.sandbox.containers.inside import files
from rollgym.sandbox.core.base import Outcome, Program
from rollgym.sandbox.core.languages import Toolchain, commands
from rollgym.sandbox.core.limits import Limits
from rollgym.sandbox.core.outcomes import Facts, classify
from rollgym.sandbox.supervisor.entering import enter
from rollgym.sandbox.supervisor.files import collect, lay
from rollgym.sandbox.supervisor.frames import FrameError, receive_frame, send_frame
from rollgym.sandbox.supervisor.order import Order


@given(
    head=st.dictionaries(st.text(), st.integers() | st.text() | st.none() | st.lists(st.booleans())),
    blobs=st.lists(st.binary(max_size=200), max_size=5),
)
def test_a_message_arrives_as_it_was_sent(head: dict[str, object], blobs: list[bytes]) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        send_frame(ours, head, blobs)
        send_frame(ours, {"next": True})
        ours.shutdown(socket.SHUT_WR)
        frame = receive_frame(theirs)
        assert frame is not None
        assert (frame.head, list(frame.blobs)) == (head, blobs)
        following = receive_frame(theirs)
        assert following is not None
        assert following.head == {"next": True}
        assert receive_frame(theirs) is None


def test_descriptors_travel_with_a_message() -> None:
    ours, theirs = socket.socketpair()
    reading, writing = os.pipe()
    with ours, theirs:
        send_frame(ours, {}, [b"x"], [writing])
        os.close(writing)
        frame = receive_frame(theirs)
        assert frame is not None
        os.write(frame.descriptors[0], b"through")
        frame.close()
        assert os.read(reading, 64) == b"through"
        assert os.read(reading, 64) == b""
    os.close(reading)


@given(st.binary(min_size=1, max_size=60))
def test_bytes_that_are_no_message_are_an_error_and_no_more(data: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(data)
        ours.shutdown(socket.SHUT_WR)
        with contextlib.suppress(FrameError):
            while (frame := receive_frame(theirs, most_bytes=1 << 16)) is not None:
                assert isinstance(frame.head, dict)


def test_only_plain_files_are_collected(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (tmp_path / "outside").write_text("secret")
    lay(str(work), "sub/plain", b"plain")
    lay(str(work), "large", bytes(101))
    (work / "link").symlink_to(tmp_path / "outside")
    (work / "inner_link").symlink_to("sub/plain")
    (work / "up").symlink_to(tmp_path)
    os.link(work / "large", work / "twin")
    os.mkfifo(work / "pipe")
    with (work / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    names = ["sub/plain", "link", "inner_link", "up/outside", "twin", "large", "pipe", "sparse", "sub", "missing",
             "../outside", str(tmp_path / "outside"), "", "."]  # fmt: skip
    assert collect(str(work), names, most_bytes=100) == {"sub/plain": b"plain"}


@given(st.text(alphabet="a./\0", max_size=8))
def test_no_name_leads_out_of_the_working_directory(
    tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    directory = tmp_path_factory.mktemp("lay")
    work = directory / "work"
    work.mkdir()
    try:
        lay(str(work), name, b"x")
    except (ValueError, OSError):
        assert not any(path.is_file() for path in work.rglob("*"))
    else:
        assert sum(path.is_file() for path in work.rglob("*")) == 1
    assert os.listdir(directory) == ["work"]


@pytest.mark.parametrize(
    ("facts", "outcome"),
    [
        (Facts(exit_code=0), Outcome.OK),
        (Facts(exit_code=0, stderr=b"MemoryError"), Outcome.OK),
        (Facts(exit_code=0, disk_full=True, pids_refused=True), Outcome.OK),
        (Facts(exit_code=0, memory_exhausted=True), Outcome.MEMORY_LIMIT),
        (Facts(exit_code=1), Outcome.NON_ZERO_EXIT),
        (Facts(exit_code=1, stderr=b"Traceback\nMemoryError\n"), Outcome.MEMORY_LIMIT),
        (Facts(exit_code=1, disk_full=True), Outcome.DISK_LIMIT),
        (Facts(exit_code=1, pids_refused=True), Outcome.PIDS_LIMIT),
        (Facts(signal=signal.SIGXFSZ), Outcome.DISK_LIMIT),
        (Facts(signal=signal.SIGXCPU), Outcome.TIME_LIMIT),
        (Facts(signal=signal.SIGKILL, cpu_seconds=11), Outcome.TIME_LIMIT),
        (Facts(signal=signal.SIGKILL), Outcome.NON_ZERO_EXIT),
        (Facts(signal=signal.SIGSEGV), Outcome.NON_ZERO_EXIT),
        (Facts(signal=signal.SIGKILL, stopped_for="time"), Outcome.TIME_LIMIT),
        (Facts(signal=signal.SIGKILL, stopped_for="output"), Outcome.OUTPUT_LIMIT),
        (Facts(signal=signal.SIGKILL, stopped_for="memory"), Outcome.MEMORY_LIMIT),
        (Facts(signal=signal.SIGKILL, stopped_for="disk"), Outcome.DISK_LIMIT),
        (Facts(signal=signal.SIGKILL, stopped_for="pids"), Outcome.PIDS_LIMIT),
    ],
)
def test_facts_become_outcomes(facts: Facts, outcome: Outcome) -> None:
    found, detail = classify(facts, Limits())
    assert found is outcome
    assert bool(detail) == (outcome is not Outcome.OK)


def test_command_lines_keep_words_apart() -> None:
    tools = Toolchain()
    program = Program("bash", "", ("two words", "$(id)", "-x"))
    assert commands(program, tools).run == ("/bin/bash", "/work/main.sh", "two words", "$(id)", "-x")
    compiled = commands(Program("cpp", ""), tools)
    assert compiled.compile is not None
    assert compiled.run == ("/work/main",)


def test_what_a_container_is_shown_below_its_own_folders_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, temporary = tmp_path / "work", tmp_path / "tmp"
    for folder in (work / "agent" / "code", work / "left" / "deep", temporary):
        folder.mkdir(parents=True)
    for file in (work / "agent" / "code" / "main.py", work / "x", temporary / "y", work / "agent" / "z"):
        file.touch()
    kept = frozenset([str(work / "agent" / "code")])
    monkeypatch.setattr(files, "_WRITABLE", (str(work), str(temporary)))
    monkeypatch.setattr(files, "shown", lambda: kept)
    assert files.wipe(kept)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["agent", "code", "main.py", "tmp", "work"]
    assert not files.wipe(kept | {str(work / "agent" / "moved")}), "what it was shown is elsewhere now"


def test_a_confinement_that_nobody_knows_runs_nothing() -> None:
    order = Order(
        confinement="landlok", stages=(), limits=Limits(), environment={}, directory="/", file_names=()
    )
    with pytest.raises(KeyError, match="landlok"):
        enter(order, None)
