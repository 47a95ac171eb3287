"""What every back-end does with ordinary programs."""

from collections.abc import Iterator

import pytest

from sandbox.base import Sandbox, SandboxUnavailableError
from sandbox.limits import Limits
from sandbox.program import Program
from sandbox.result import Outcome
from sandbox.selection import open_sandbox


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    try:
        opened = open_sandbox("namespaces")
    except SandboxUnavailableError as error:
        pytest.skip(str(error))
    yield opened
    opened.close()


def test_a_program_reads_its_input_and_its_files_and_leaves_files(sandbox: Sandbox) -> None:
    source = "import sys; open('out/b.txt', 'w').write(open('a.txt').read() + input()); print(sys.argv[1])"
    program = Program("python", source, ("word",))
    files = {"a.txt": b"from a file, ", "out/keep": b""}
    result = sandbox.run(program, files=files, stdin=b"from the input\n", collect=["out/b.txt", "missing"])
    assert (result.outcome, result.exit_code, result.stdout) == (Outcome.OK, 0, b"word\n")
    assert result.files == {"out/b.txt": b"from a file, from the input"}


def test_bash_and_cpp_run_and_a_compile_error_is_told_apart(sandbox: Sandbox) -> None:
    assert sandbox.run(Program("bash", "exit 3")).exit_code == 3
    compiled = sandbox.run(Program("cpp", '#include <cstdio>\nint main() { puts("hi"); }'))
    assert (compiled.outcome, compiled.stdout) == (Outcome.OK, b"hi\n")
    broken = sandbox.run(Program("cpp", "int main() { return x; }"))
    assert broken.outcome is Outcome.COMPILE_ERROR
    assert b"main.cpp:1" in broken.stderr


def test_the_time_limit_ends_a_program_and_keeps_what_it_wrote(sandbox: Sandbox) -> None:
    result = sandbox.run(Program("bash", "echo before; sleep 60"), limits=Limits(wall_seconds=0.3))
    assert (result.outcome, result.stdout, result.exit_code) == (Outcome.TIME_LIMIT, b"before\n", None)


def test_a_session_answers_until_it_is_closed(sandbox: Sandbox) -> None:
    session = sandbox.open_session(Program("python", "while True: print(eval(input()), flush=True)"))
    for question, answer in ((b"6 * 7\n", b"42\n"), (b"len('abc')\n", b"3\n")):
        session.write(question)
        assert session.read(10) == answer
    assert session.alive
    assert session.close().outcome is Outcome.OK
    assert not session.alive
