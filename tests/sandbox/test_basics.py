"""What every back-end does with ordinary programs: the suite for authors, and what is asked of ours beside it."""

import contextlib

import pytest

from rollgym.sandbox.conformance import SandboxConformance
from rollgym.sandbox.core.base import Language, Outcome, Program, Sandbox
from rollgym.sandbox.core.languages import host_toolchain
from rollgym.sandbox.core.limits import Limits


class TestConformance(SandboxConformance):
    """Against each back-end that works here."""


def test_what_a_run_used_is_told(sandbox: Sandbox) -> None:
    source = "data = bytearray(60 << 20)\nn = 0\nwhile __import__('time').process_time() < 0.2: n += 1"
    result = sandbox.run(Program("python", source))
    assert result.outcome is Outcome.OK
    assert 0.2 <= result.cpu_seconds <= result.wall_seconds + 0.2
    assert 55 <= result.peak_memory_mb <= 120
    assert result.guarantees is not None
    assert result.guarantees.fresh == sandbox.probe().fresh


@pytest.mark.parametrize(
    ("program", "files", "limits"),
    [
        (Program("bash", "echo ran"), {"big": bytes(3 << 20)}, Limits(disk_mb=2)),
        (Program("bash", "echo ran"), {f"part/{n}": bytes(300 << 10) for n in range(8)}, Limits(disk_mb=2)),
        (Program("bash", "echo ran"), {f"many/{n}": b"" for n in range(64)}, Limits(inodes=64)),
        (Program("bash", "echo ran"), {"a/b/c/d/e/f/g": b""}, Limits(inodes=7)),
        (Program("python", f"print('{'x' * (3 << 20)}')"), {}, Limits(disk_mb=2)),
    ],
    ids=["one file", "files together", "many files", "directories", "the program itself"],
)
def test_an_upload_that_has_no_room_is_one_outcome_everywhere(
    sandbox: Sandbox, program: Program, files: dict[str, bytes], limits: Limits
) -> None:
    result = sandbox.run(program, files=files, limits=limits)
    assert (result.outcome, result.stdout, result.exit_code) == (Outcome.DISK_LIMIT, b"", None)
    assert "given to begin with" in result.detail
    session = sandbox.open_session(program, files=files, limits=limits)
    assert (session.read(0.1), session.alive) == (b"", False)
    with pytest.raises(BrokenPipeError):
        session.write(b"x")
    assert session.close() == result


def test_an_upload_that_just_fits_is_there(sandbox: Sandbox) -> None:
    files = {"big": bytes((2 << 20) - 8192), "a/b": b""}
    result = sandbox.run(Program("bash", "stat -c %s big"), files=files, limits=Limits(disk_mb=2, inodes=16))
    assert (result.outcome, result.stdout) == (Outcome.OK, f"{(2 << 20) - 8192}\n".encode())


@pytest.mark.parametrize("language", ["python", "bash", "cpp"])
def test_no_file_takes_the_place_of_the_program(sandbox: Sandbox, language: Language) -> None:
    sources: dict[Language, str] = {
        "python": "print('program', open('main.py').read(), open('main').read())",
        "bash": "echo program $(cat main.sh) $(cat main)",
        "cpp": '#include <fstream>\n#include <iostream>\nint main() { std::string a, b; std::ifstream("main.cpp") >> a;'
        ' std::ifstream("main") >> b; std::cout << "program " << a << " " << b << std::endl; }',
    }
    if language == "cpp" and host_toolchain().cxx is None:
        pytest.skip("there is no C++ compiler: install g++")
    files = {f"main.{ending}": b"beside" for ending in ("py", "sh", "cpp")} | {
        "main": b"it",
        "program.py/x": b"",
    }
    result = sandbox.run(Program(language, sources[language]), files=files)
    assert (result.outcome, result.stdout) == (Outcome.OK, b"program beside it\n"), result.stderr
    session = sandbox.open_session(Program(language, sources[language]), files=files)
    assert session.read(20) == b"program beside it\n"
    session.close()


def test_a_session_that_is_written_to_and_never_read_is_held_back(sandbox: Sandbox) -> None:
    session = sandbox.open_session(Program("bash", "exec cat"), limits=Limits(wall_seconds=2))
    with contextlib.suppress(BrokenPipeError):
        for _ in range(64):
            session.write(bytes(1 << 20))
    # It would have been done in a moment if somebody had kept what comes back.
    assert session.close().outcome is Outcome.TIME_LIMIT
