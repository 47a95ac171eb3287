"""What every back-end must do, as a suite that its author runs: by `roll-env sandbox check NAME`, or with pytest.

    class TestMine(SandboxConformance):
        @pytest.fixture(scope="class")
        def sandbox(self):
            with closing(MySandbox()) as opened:
                yield opened

Cases look at what a program can see, and at the outcome that its caller receives. A guarantee that a back-end does not
claim, for example a bound of the disk, is not tested. The suite needs no pytest; it skips as `unittest` does.
"""

import contextlib
import inspect
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, cast
from unittest import SkipTest

from rollgym.sandbox.core.base import (
    CancellableSandbox,
    Cancellation,
    Guarantees,
    Outcome,
    Program,
    RunResult,
    Sandbox,
)
from rollgym.sandbox.core.limits import Limits
from rollgym.sandbox.core.probe import probe_sandbox

Verdict = Literal["pass", "fail", "skip"]
_MIB = 1 << 20
_PATIENCE_S = 30.0
_FORKS = """
import os, signal
started = []
for _ in range(64):
    try:
        child = os.fork()
    except OSError:
        break
    if child == 0:
        signal.pause()
    started.append(child)
print(len(started), flush=True)
for child in started:
    os.kill(child, signal.SIGKILL)
"""


def check_backend(sandbox: Sandbox) -> Iterator[tuple[str, Verdict, str]]:
    """Run every case of the suite on a back-end; yield the case, its result, and the reason unless it passed."""
    suite = SandboxConformance()
    for name in [each for each in vars(SandboxConformance) if each.startswith("test_")]:
        title = name.removeprefix("test_").replace("_", " ")
        try:
            getattr(suite, name)(sandbox)
        except SkipTest as reason:
            yield title, "skip", str(reason)
        except Exception as error:  # noqa: BLE001 - the boundary to the back-end of another package
            yield title, "fail", str(error) if isinstance(error, AssertionError) else repr(error)
        else:
            yield title, "pass", ""


class SandboxConformance:
    """Derive from it, and give it a fixture `sandbox`: an opened back-end, which no case closes."""

    def test_a_program_reads_its_input_and_its_files_and_leaves_files(self, sandbox: Sandbox) -> None:
        """Arguments, standard input, files laid in, and files brought back; one that is not there is absent."""
        source = (
            "import sys; open('out/b.txt', 'w').write(open('a.txt').read() + input()); print(sys.argv[1])"
        )
        files = {"a.txt": b"from a file, ", "out/keep": b""}
        program = Program("python", source, ("word",))
        result = sandbox.run(
            program, files=files, stdin=b"from the input\n", collect=["out/b.txt", "missing"]
        )
        _same("the result", (result.outcome, result.exit_code, result.stdout), (Outcome.OK, 0, b"word\n"))
        _same("the files", dict(result.files), {"out/b.txt": b"from a file, from the input"})

    def test_how_a_program_ends_is_told(self, sandbox: Sandbox) -> None:
        """An exit code with what was written to both streams."""
        result = sandbox.run(Program("bash", "echo said; echo trouble >&2; exit 3"))
        told = (result.outcome, result.exit_code, result.stdout, result.stderr)
        _same("the result", told, (Outcome.NON_ZERO_EXIT, 3, b"said\n", b"trouble\n"))
        backend = None if result.guarantees is None else result.guarantees.backend
        _same("the back-end of the result's guarantees", backend, sandbox.probe().backend)

    def test_a_compile_error_is_told_apart(self, sandbox: Sandbox) -> None:
        """C++ is compiled inside the sandbox, if it has a compiler."""
        compiled = sandbox.run(Program("cpp", '#include <cstdio>\nint main() { puts("hi"); }'))
        if compiled.outcome is Outcome.SANDBOX_ERROR:
            raise SkipTest(compiled.detail)
        _same("the result", (compiled.outcome, compiled.stdout), (Outcome.OK, b"hi\n"))
        broken = sandbox.run(Program("cpp", "int main() { return x; }"))
        _outcome(broken, Outcome.COMPILE_ERROR)
        _hold(b"main.cpp:1" in broken.stderr, f"the compiler's message is missing: {broken.stderr!r}")

    def test_the_time_limit_ends_a_program_and_keeps_what_it_wrote(self, sandbox: Sandbox) -> None:
        """The whole run is killed; the caller gets the output from before."""
        result = sandbox.run(Program("bash", "echo before; sleep 60"), limits=Limits(wall_seconds=3))
        _outcome(result, Outcome.TIME_LIMIT)
        _same("what was written", (result.stdout, result.exit_code), (b"before\n", None))

    def test_the_memory_limit_is_kept(self, sandbox: Sandbox) -> None:
        """More memory than there may be is an outcome of its own."""
        _claimed(sandbox.probe().memory != "none", "memory")
        source = "data = bytearray(1 << 30)\nfor place in range(0, len(data), 4096): data[place] = 1"
        _outcome(sandbox.run(Program("python", source), limits=Limits(memory_mb=128)), Outcome.MEMORY_LIMIT)

    def test_the_disk_limit_is_kept(self, sandbox: Sandbox) -> None:
        """More files than there may be is an outcome of its own."""
        _claimed(sandbox.probe().disk, "disk")
        source = "head -c 16000000 /dev/zero > big"
        _outcome(sandbox.run(Program("bash", source), limits=Limits(disk_mb=2)), Outcome.DISK_LIMIT)

    def test_the_number_of_processes_is_bounded(self, sandbox: Sandbox) -> None:
        """A program that starts processes until it cannot has not started more than it may."""
        _claimed(sandbox.probe().level != "none", "processes")
        result = sandbox.run(Program("python", _FORKS), limits=Limits(pids=16, wall_seconds=_PATIENCE_S))
        count = int(result.stdout or b"0")
        _hold(0 < count <= 16, f"a program that may have 16 processes has started {count} ({result.detail})")

    def test_output_is_cut_and_the_rest_is_read_all_the_same(self, sandbox: Sandbox) -> None:
        """A program that writes much is neither held up nor kept whole."""
        program = Program("bash", "head -c 3000000 /dev/zero; echo end >&2")
        result = sandbox.run(program, limits=Limits(output_kb=1))
        _same(
            "the result", (result.outcome, result.stdout, result.stderr), (Outcome.OK, bytes(1024), b"end\n")
        )
        _same("what is cut", (result.stdout_truncated, result.stderr_truncated), (True, False))

    def test_output_without_end_ends_the_run(self, sandbox: Sandbox) -> None:
        """Before its time is over."""
        result = sandbox.run(Program("bash", "yes"), limits=Limits(wall_seconds=_PATIENCE_S))
        _outcome(result, Outcome.OUTPUT_LIMIT)

    def test_input_that_nobody_reads_and_input_larger_than_a_pipe(self, sandbox: Sandbox) -> None:
        """Neither holds up the run."""
        _outcome(sandbox.run(Program("bash", "exit 0"), stdin=bytes(_MIB)), Outcome.OK)
        read = sandbox.run(Program("bash", "wc -c"), stdin=bytes(_MIB))
        _same("what was read", read.stdout.strip(), b"1048576")

    def test_a_file_outside_of_the_working_directory_is_refused(self, sandbox: Sandbox) -> None:
        """The refused program is never started."""
        for name in ("/etc/x", "../x", "a/../../x", "", "a//b"):
            result = sandbox.run(Program("bash", "echo ran"), files={name: b"x"})
            _same(f"a file {name!r}", (result.outcome, result.stdout), (Outcome.SANDBOX_ERROR, b""))

    def test_an_upload_that_has_no_room_is_the_outcome_of_the_disk(self, sandbox: Sandbox) -> None:
        """Nothing is started then, and a session has ended before it began."""
        limits, files = Limits(disk_mb=2), {"big": bytes(3 * _MIB)}
        result = sandbox.run(Program("bash", "echo ran"), files=files, limits=limits)
        _same("the result", (result.outcome, result.stdout), (Outcome.DISK_LIMIT, b""))
        session = sandbox.open_session(Program("bash", "echo ran"), files=files, limits=limits)
        _same("the session", (session.read(0.1), session.alive), (b"", False))
        _outcome(session.close(), Outcome.DISK_LIMIT)

    def test_only_plain_files_are_brought_back(self, sandbox: Sandbox) -> None:
        """Links and pipes are left in the sandbox."""
        source = "ln -s /etc/hostname link; mkfifo pipe; mkdir folder; echo plain > plain"
        result = sandbox.run(Program("bash", source), collect=["link", "pipe", "folder", "plain"])
        _same("the files", dict(result.files), {"plain": b"plain\n"})

    def test_a_run_finds_nothing_of_the_one_before(self, sandbox: Sandbox) -> None:
        """Neither in its directory nor, if files are kept apart, in the usual places."""
        sandbox.run(Program("bash", "echo mine > conformance-left; cp conformance-left /tmp; true"))
        places = ". /tmp" if sandbox.probe().files else "."
        found = sandbox.run(Program("bash", f"ls -a {places}"))
        _hold(b"conformance-left" not in found.stdout, f"a file of another run is seen: {found.stdout!r}")

    def test_nothing_that_a_program_starts_outlives_it(self, sandbox: Sandbox) -> None:
        """As far as this machine shows processes; those of a server elsewhere it does not."""
        _claimed(sandbox.probe().processes, "processes")
        seconds = f"1{os.urandom(4).hex()}".translate(str.maketrans("abcdef", "012345"))
        _outcome(sandbox.run(Program("bash", f"setsid sleep {seconds} & disown; true")), Outcome.OK)
        stubborn = f"trap '' TERM INT HUP; setsid sleep {seconds} & disown; sleep {seconds}"
        _outcome(sandbox.run(Program("bash", stubborn), limits=Limits(wall_seconds=1)), Outcome.TIME_LIMIT)
        left = [each for each in _command_lines() if seconds.encode() in each]
        _same("processes that outlive their run", left, [])

    def test_a_program_sees_no_environment_of_ours(self, sandbox: Sandbox) -> None:
        """A secret in an environment variable stays one, whatever else is claimed."""
        name = f"ROLLGYM_CONFORMANCE_{os.urandom(4).hex()}"
        os.environ[name] = "a secret"
        try:
            result = sandbox.run(Program("bash", "env"))
        finally:
            del os.environ[name]
        _hold(name.encode() not in result.stdout, "a program sees the environment of this process")

    def test_runs_in_several_threads_know_nothing_of_each_other(self, sandbox: Sandbox) -> None:
        """Any thread may call at any time."""
        with ThreadPoolExecutor(4) as threads:
            results = list(threads.map(lambda n: sandbox.run(Program("bash", f"echo {n}")), range(8)))
        _same("what they wrote", [each.stdout for each in results], [b"%d\n" % n for n in range(8)])

    def test_a_session_answers_until_it_is_closed(self, sandbox: Sandbox) -> None:
        """Closing it twice gives the same result, and a later write raises `BrokenPipeError`."""
        session = sandbox.open_session(Program("python", "while True: print(eval(input()), flush=True)"))
        for question, answer in ((b"6 * 7\n", b"42\n"), (b"len('abc')\n", b"3\n")):
            session.write(question)
            _same("the answer", session.read(_PATIENCE_S), answer)
        _hold(session.alive, "the program runs, and is said not to")
        closed = session.close()
        _outcome(closed, Outcome.OK)
        _same("closed again", (session.alive, session.close()), (False, closed))
        with contextlib.suppress(BrokenPipeError):
            session.write(b"1\n")
            raise AssertionError("writing to what is closed must raise BrokenPipeError")

    def test_a_session_that_ends_by_itself_says_how(self, sandbox: Sandbox) -> None:
        """Its standard error comes with the result."""
        program = Program("bash", "echo first; echo trouble >&2; read -r word; exit ${#word}")
        session = sandbox.open_session(program)
        _same("what it says", session.read(_PATIENCE_S), b"first\n")
        session.write(b"four\n")
        _same("the end", session.read(_PATIENCE_S), b"")
        result = session.close()
        told = (result.outcome, result.exit_code, result.stderr)
        _same("the result", told, (Outcome.NON_ZERO_EXIT, 4, b"trouble\n"))

    def test_the_time_limit_ends_a_session(self, sandbox: Sandbox) -> None:
        """The limit is of the whole session."""
        session = sandbox.open_session(Program("bash", "sleep 60"), limits=Limits(wall_seconds=0.3))
        _same("the end", session.read(_PATIENCE_S), b"")
        _outcome(session.close(), Outcome.TIME_LIMIT)

    def test_a_cancelled_run_ends(self, sandbox: Sandbox) -> None:
        """Needs a `run` that takes a `cancellation`; servers offer no other back-end."""
        if "cancellation" not in inspect.signature(sandbox.run).parameters:
            raise SkipTest("its `run` has no argument `cancellation`; no server will offer it")
        cancellation, limits = Cancellation(), Limits(wall_seconds=2 * _PATIENCE_S)
        timer = threading.Timer(0.5, cancellation.cancel)
        timer.start()
        run = cast(CancellableSandbox, sandbox).run
        result = run(Program("bash", "sleep 50; echo done"), limits=limits, cancellation=cancellation)
        _same("what it still did", result.stdout, b"")

    def test_it_keeps_what_it_claims(self, sandbox: Sandbox) -> None:
        """A program tries to get out, in the same way for every back-end."""
        claimed = sandbox.probe()
        seen = probe_sandbox(_Claiming(sandbox, claimed))
        broken = [
            name
            for name in ("files", "network", "processes", "privileges", "system_calls", "disk")
            if getattr(claimed, name) and not getattr(seen, name)
        ]
        _same("promises that a program could break", broken, [])


class _Claiming:
    """A back-end whose claims are the result of its own probe, tested by an attempt to escape."""

    def __init__(self, sandbox: Sandbox, claims: Guarantees) -> None:
        self.name, self.claims, self._sandbox = sandbox.name, claims, sandbox

    def run(self, program: Program, *, stdin: bytes = b"", limits: Limits) -> RunResult:
        return self._sandbox.run(program, stdin=stdin, limits=limits)

    def remedy(self, reason: str) -> str:
        return ""


def _hold(true: bool, message: str) -> None:
    if not true:  # No `assert`: the suite must also hold if Python omits assertions.
        raise AssertionError(message)


def _same(what: str, found: Any, expected: Any) -> None:
    _hold(found == expected, f"{what}: expected {expected!r}, not {found!r}")


def _outcome(result: RunResult, expected: Outcome) -> None:
    said = f" ({result.detail})" if result.detail else ""
    _hold(
        result.outcome is expected, f"the outcome must be {expected.value}, not {result.outcome.value}{said}"
    )


def _claimed(kept: bool, what: str) -> None:
    if not kept:
        raise SkipTest(f"it makes no promise about {what}")


def _command_lines() -> Iterator[bytes]:
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # It has ended in the meantime.
            yield place.read_bytes()
