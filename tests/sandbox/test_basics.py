"""What every back-end does with ordinary programs."""

import contextlib

import pytest

from sandbox.core.base import Sandbox
from sandbox.core.languages import host_toolchain
from sandbox.core.limits import Limits
from sandbox.core.program import Language, Program
from sandbox.core.result import Outcome


def test_a_program_reads_its_input_and_its_files_and_leaves_files(sandbox: Sandbox) -> None:
    source = "import sys; open('out/b.txt', 'w').write(open('a.txt').read() + input()); print(sys.argv[1])"
    program = Program("python", source, ("word",))
    files = {"a.txt": b"from a file, ", "out/keep": b""}
    result = sandbox.run(program, files=files, stdin=b"from the input\n", collect=["out/b.txt", "missing"])
    assert (result.outcome, result.exit_code, result.stdout) == (Outcome.OK, 0, b"word\n")
    assert result.files == {"out/b.txt": b"from a file, from the input"}


def test_a_program_is_compiled_inside_and_a_compile_error_is_told_apart(sandbox: Sandbox) -> None:
    if host_toolchain().cxx is None:
        pytest.skip("there is no C++ compiler: install g++")
    compiled = sandbox.run(Program("cpp", '#include <cstdio>\nint main() { puts("hi"); }'))
    assert (compiled.outcome, compiled.stdout) == (Outcome.OK, b"hi\n")
    broken = sandbox.run(Program("cpp", "int main() { return x; }"))
    assert broken.outcome is Outcome.COMPILE_ERROR
    assert b"main.cpp:1" in broken.stderr


def test_the_time_limit_ends_a_program_and_keeps_what_it_wrote(sandbox: Sandbox) -> None:
    result = sandbox.run(Program("bash", "echo before; sleep 60"), limits=Limits(wall_seconds=3))
    assert (result.outcome, result.stdout, result.exit_code) == (Outcome.TIME_LIMIT, b"before\n", None)


def test_a_session_answers_until_it_is_closed(sandbox: Sandbox) -> None:
    session = sandbox.open_session(Program("python", "while True: print(eval(input()), flush=True)"))
    for question, answer in ((b"6 * 7\n", b"42\n"), (b"len('abc')\n", b"3\n")):
        session.write(question)
        assert session.read(10) == answer
    assert session.alive
    closed = session.close()
    assert closed.outcome is Outcome.OK
    assert not session.alive
    assert session.close() is closed
    with pytest.raises(BrokenPipeError):
        session.write(b"1\n")


def test_a_session_that_ends_by_itself_says_how(sandbox: Sandbox) -> None:
    session = sandbox.open_session(
        Program("bash", "echo first; echo trouble >&2; read -r word; exit ${#word}")
    )
    assert session.read(10) == b"first\n"
    session.write(b"four\n")
    assert session.read(10) == b""
    result = session.close()
    assert (result.outcome, result.exit_code, result.stderr) == (Outcome.NON_ZERO_EXIT, 4, b"trouble\n")


def test_the_time_limit_ends_a_session(sandbox: Sandbox) -> None:
    session = sandbox.open_session(Program("bash", "sleep 60"), limits=Limits(wall_seconds=0.3))
    assert session.read(20) == b""
    assert session.close().outcome is Outcome.TIME_LIMIT


def test_what_a_run_used_is_told(sandbox: Sandbox) -> None:
    source = "data = bytearray(60 << 20)\nn = 0\nwhile __import__('time').process_time() < 0.2: n += 1"
    result = sandbox.run(Program("python", source))
    assert result.outcome is Outcome.OK
    assert 0.2 <= result.cpu_seconds <= result.wall_seconds + 0.2
    assert 55 <= result.peak_memory_mb <= 120
    assert result.guarantees is not None
    assert result.guarantees.fresh == sandbox.probe().fresh


def test_output_is_cut_and_the_rest_is_read_all_the_same(sandbox: Sandbox) -> None:
    result = sandbox.run(
        Program("bash", "head -c 3000000 /dev/zero; echo end >&2"), limits=Limits(output_kb=1)
    )
    assert (result.outcome, result.stdout, result.stderr) == (Outcome.OK, bytes(1024), b"end\n")
    assert (result.stdout_truncated, result.stderr_truncated) == (True, False)


def test_input_that_nobody_reads_and_input_larger_than_a_pipe(sandbox: Sandbox) -> None:
    assert sandbox.run(Program("bash", "exit 0"), stdin=bytes(1 << 20)).outcome is Outcome.OK
    assert sandbox.run(Program("bash", "wc -c"), stdin=bytes(1 << 20)).stdout.strip() == b"1048576"


@pytest.mark.parametrize("name", ["/etc/x", "../x", "a/../../x", "", "a//b"])
def test_a_file_outside_of_the_working_directory_is_refused(sandbox: Sandbox, name: str) -> None:
    result = sandbox.run(Program("bash", "echo ran"), files={name: b"x"})
    assert (result.outcome, result.stdout) == (Outcome.SANDBOX_ERROR, b"")


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
