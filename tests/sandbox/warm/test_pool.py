"""Warm sandboxes: quick, and clean for the next run."""

import json
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from rollgym.sandbox.core.base import Guarantees, Outcome, Program, RunResult, SandboxUnavailableError
from rollgym.sandbox.core.limits import Limits
from rollgym.sandbox.selection import open_sandbox
from rollgym.sandbox.warm.pool import WarmPool


@pytest.fixture(scope="module")
def pool() -> Iterator[WarmPool]:
    try:
        inner = open_sandbox("namespaces")
    except SandboxUnavailableError as error:
        pytest.skip(str(error))
    opened = WarmPool(inner, workers=1, limits=Limits(memory_mb=256))
    yield opened
    opened.close()


_LIMITS = Limits(memory_mb=256, wall_seconds=30)


def run(pool: WarmPool, source: str, stdin: bytes = b"", limits: Limits = _LIMITS) -> RunResult:
    return pool.run(Program("python", source), stdin=stdin, limits=limits)


def server_of(pool: WarmPool) -> bytes:
    """Return something that changes when the warm sandbox is replaced."""
    # Where the kernel has put its interpreter.
    found = run(pool, "import os; print(id(os), hash('x'))").stdout
    assert found
    return found


def test_a_program_behaves_as_in_an_interpreter_of_its_own(pool: WarmPool) -> None:
    source = """
import atexit, sys, threading
atexit.register(print, "last")
threading.Timer(0.05, print, ["timer"]).start()
print(__name__, sys.argv[1:], input())
"""
    result = pool.run(Program("python", source, ("word",)), stdin=b"line\n", limits=_LIMITS)
    assert result.stdout == b"__main__ ['word'] line\ntimer\nlast\n"
    assert result.guarantees is not None
    assert not result.guarantees.fresh
    assert not pool.probe().fresh
    failed = run(pool, "def f():\n    return 1 / 0\nf()")
    assert (failed.outcome, failed.exit_code) == (Outcome.NON_ZERO_EXIT, 1)
    assert failed.stderr.count(b"File ") == 2
    assert b"ZeroDivisionError" in failed.stderr
    assert run(pool, "raise SystemExit(7)").exit_code == 7
    assert run(pool, "import sys; sys.exit('no')").stderr == b"no\n"


def test_files_come_and_go(pool: WarmPool) -> None:
    source = "import os; open('out', 'w').write(open('in').read()); os.symlink('/etc/passwd', 'link')"
    result = pool.run(
        Program("python", source), files={"in": b"x"}, collect=["out", "link", "in"], limits=_LIMITS
    )
    assert result.files == {"out": b"x", "in": b"x"}


def test_a_well_behaved_run_keeps_the_sandbox_and_leaves_nothing(pool: WarmPool) -> None:
    before = server_of(pool)
    run(pool, "import builtins, json; builtins.print = None; json.loads = None; open('f', 'w').write('x')")
    look = "import json, os; print(json.loads('1'), os.listdir('.'), len(os.listdir('/work')))"
    assert run(pool, look).stdout == b"1 ['main.py', 'tmp'] 1\n"
    assert server_of(pool) == before


@pytest.mark.parametrize(
    "source",
    [
        "import os\nif os.fork() == 0: os.setsid(); os.execv('/bin/sleep', ['sleep', '1000'])",
        "open('/tmp/planted', 'w')",
        "import os; os.kill(os.getpid(), 9)",
        "while True: pass",
        "import os; os.kill(os.getppid(), 9); __import__('time').sleep(9)",
        "import os; os.kill(os.getppid(), 19); __import__('time').sleep(9)",
        "import os\nwhile True: os.write(1, bytes(65536))",
    ],
    ids=["leaves a process", "leaves a file", "dies", "spins", "kills", "stops", "floods"],
)
def test_a_misbehaving_run_costs_the_sandbox_and_nobody_else(pool: WarmPool, source: str) -> None:
    before = server_of(pool)
    run(pool, source, limits=Limits(memory_mb=256, wall_seconds=0.7))
    assert server_of(pool) != before
    assert run(pool, "import os; print(os.path.exists('/tmp/planted'))").stdout == b"False\n"


# What a program may try to leave: something for the next one to find, or something that hurts it.
LEFT = {
    "a limit of files": "import os, resource; resource.prlimit(os.getppid(), resource.RLIMIT_FSIZE, (0, 0))",
    "a limit of memory": "import os, resource; resource.prlimit(os.getppid(), resource.RLIMIT_AS, (120 << 20,) * 2)",
    "a limit of time": "import os, resource; resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1))",
    "a limit of stack": "import os, resource; resource.prlimit(os.getppid(), resource.RLIMIT_STACK, (1 << 18,) * 2)",
    "a soft limit": "import os, resource; resource.prlimit(os.getppid(), resource.RLIMIT_NPROC, (9, 9))",
    "a priority": "import os; os.setpriority(os.PRIO_PROCESS, os.getppid(), 19)",
    "everybody's priority": "import os; os.setpriority(os.PRIO_USER, os.getuid(), 19)",
    "a processor": "import os; os.sched_setaffinity(os.getppid(), {min(os.sched_getaffinity(0))})",
    "a policy": "import os; os.sched_setscheduler(os.getppid(), os.SCHED_IDLE, os.sched_param(0))",
    "a class of input": "import ctypes, os; assert not ctypes.CDLL(None).syscall(251, 1, os.getppid(), 3 << 13)",
    "a note beside it": "import os; os.makedirs('/work/.tmp', exist_ok=True); open('/work/.tmp/secret', 'w')",
    "a note in the source": "open('/work/main.py', 'a').write('# secret')",
    "a note as a directory": "import os; os.mkdir('/work/' + 'secret' + 10 * 'x')",
    "a note for all": "open('/tmp/secret', 'w').write('x')",
    "a note in memory": "open('/dev/shm/secret', 'w').write('x')",
    "an attribute": "import os; os.setxattr('/work', 'user.secret', b'x')",
    "a time": "import os; os.utime('/tmp', (7, 7))",
    "a mode": "import os; os.chmod('/tmp', 0o700)",
    "another mode": "import os; os.chmod('/work', 0o711)",
}
LOOK = """
import os, resource
for name in sorted(dir(resource)):
    if name.startswith("RLIMIT_"): print(name, resource.getrlimit(getattr(resource, name)))
print(os.getpriority(os.PRIO_PROCESS, 0), len(os.sched_getaffinity(0)), os.sched_getscheduler(0))
for place in ("/work", "/tmp", "/dev/shm", "/var/tmp", "/"):
    try:
        found = os.stat(place)
        names = [name for name in os.listdir(place) if place + "/" + name != os.getcwd()]
        try: attributes = os.listxattr(place)
        except OSError: attributes = []
        print(place, oct(found.st_mode), found.st_mtime == 7, sorted(names), attributes)
    except FileNotFoundError: pass
"""


@pytest.mark.parametrize("what", LEFT)
def test_nothing_is_left_or_the_sandbox_is(pool: WarmPool, what: str) -> None:
    before = run(pool, LOOK)
    assert before.outcome is Outcome.OK
    run(pool, LEFT[what])
    after = run(pool, LOOK)
    assert (after.outcome, after.stderr) == (Outcome.OK, b"")
    assert after.stdout == before.stdout


def test_a_program_may_change_itself(pool: WarmPool) -> None:
    server = server_of(pool)
    source = """
import os, resource
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
os.nice(3)
os.sched_setaffinity(0, os.sched_getaffinity(0))
os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
print("ok")
"""
    assert run(pool, source).stdout == b"ok\n"
    assert server_of(pool) == server


def test_outcomes_are_told_apart(pool: WarmPool) -> None:
    brief = Limits(memory_mb=256, wall_seconds=1)
    assert run(pool, "while True: pass", limits=brief).outcome is Outcome.TIME_LIMIT
    assert run(pool, "bytearray(1 << 30)").outcome is Outcome.MEMORY_LIMIT
    assert run(pool, "import os\nwhile True: os.write(1, bytes(65536))").outcome is Outcome.OUTPUT_LIMIT
    children = """
import os, time
for _ in range(4):
    if os.fork() == 0:
        data = bytearray(os.urandom(1 << 20)) * 120
        time.sleep(30)
        os._exit(0)
for _ in range(4):
    if os.wait()[1]: os.kill(os.getpid(), 9)
"""
    assert run(pool, children, limits=Limits(memory_mb=256, wall_seconds=25)).outcome is Outcome.MEMORY_LIMIT
    fill = "file = open('f', 'wb', buffering=0)\nwhile file.write(bytes(1 << 20)) == 1 << 20: pass\nraise OSError"
    assert run(pool, fill).outcome is Outcome.DISK_LIMIT
    assert run(pool, "print('ok')").stdout == b"ok\n"


def test_the_interpreter_that_forks_is_closed_to_programs(pool: WarmPool) -> None:
    source = """
import glob, os
parent = os.getppid()
for path in (f"/proc/{parent}/mem", f"/proc/{parent}/environ", f"/proc/{parent}/fd/1"):
    try: open(path, "rb").read(1); print("read", path)
    except OSError: pass
def own(d):
    try: return not os.readlink(f"/proc/self/fd/{d}").startswith("/proc")
    except OSError: return False
found = [d for d in range(3, 256) if own(d)]
print(found)
"""
    assert run(pool, source).stdout == b"[]\n"


def test_runs_of_many_threads_get_their_own_answers(pool: WarmPool) -> None:
    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(lambda number: run(pool, f"print({number} ** 2)").stdout, range(20)))
    assert results == [b"%d\n" % number**2 for number in range(20)]


def test_what_does_not_fit_gets_a_fresh_sandbox(pool: WarmPool) -> None:
    shell = pool.run(Program("bash", "echo $PPID"), limits=_LIMITS)
    large = run(pool, "print(1)", limits=Limits(memory_mb=512))
    for result in (shell, large):
        assert result.guarantees is not None
        assert result.guarantees.fresh


NO_GUARANTEES = Guarantees(
    "told", "none", False, False, False, False, system_calls=False, memory="none", disk=False
)


class Told:
    """A session whose program answers with what it was told to, or in which something is raised."""

    def __init__(self, answer: bytes | BaseException) -> None:
        self.alive = True
        self._answer = answer

    def write(self, data: bytes) -> None:
        pass

    def read(self, timeout_seconds: float) -> bytes:
        if isinstance(self._answer, BaseException):
            raise self._answer
        answer, self._answer = self._answer, b""
        return answer

    def close(self) -> RunResult:
        self.alive = False
        return RunResult(outcome=Outcome.OK, guarantees=NO_GUARANTEES)


class Telling:
    """A back-end of one such session."""

    name = "telling"

    def __init__(self, answer: bytes | BaseException) -> None:
        self.session = Told(answer)

    def open_session(self, *_: object, **__: object) -> Told:
        return self.session

    def probe(self) -> Guarantees:
        return NO_GUARANTEES

    def run(self, *_: object, **__: object) -> RunResult:
        raise AssertionError("it fits a warm sandbox")

    def close(self) -> None:
        pass


def message(head: object, text: bytes = b"") -> bytes:
    written = json.dumps(head).encode()
    return struct.pack("<I", len(written)) + written + text


FACTS = {
    "status": 0,
    "stopped_for": None,
    "wall_seconds": 0.1,
    "cpu_seconds": 0.1,
    "peak_bytes": 1,
    "truncated": [False, False],
    "disk_full": False,
    "names": [],
    "spotless": True,
}


@pytest.mark.parametrize(
    "answer",
    [
        b"\3\0\0\0no!",
        message([]),
        message({}),
        message({"sizes": 3}),
        message({"sizes": [-1, 0]}),
        message({"sizes": ["1"]}),
        message({"sizes": [0, 0]}),
        message({**FACTS, "sizes": []}),
        message({**FACTS, "sizes": [0, 0, 1]}, b"x"),
        message({**FACTS, "sizes": [0, 0], "status": 1 << 90}),
        message({**FACTS, "sizes": [0, 0], "names": None}),
        message({**FACTS, "sizes": [0, 0], "truncated": []}),
    ],
)
def test_a_garbled_answer_costs_the_sandbox_and_no_more(answer: bytes) -> None:
    inner = Telling(answer)
    result = run(WarmPool(inner, workers=1), "print(1)")
    assert (result.outcome, result.detail) == (Outcome.NON_ZERO_EXIT, "it ended its warm sandbox")
    assert not inner.session.alive


def test_an_answer_that_is_not_garbled_keeps_the_sandbox() -> None:
    inner = Telling(message({**FACTS, "sizes": [2, 0]}, b"1\n"))
    result = run(WarmPool(inner, workers=1), "print(1)")
    assert (result.outcome, result.stdout, inner.session.alive) == (Outcome.OK, b"1\n", True)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("no more descriptors")], ids=repr)
def test_no_sandbox_outlives_a_run_that_was_broken_off(error: BaseException) -> None:
    inner = Telling(error)
    pool = WarmPool(inner, workers=1)
    with pytest.raises(type(error)):
        run(pool, "print(1)")
    assert not inner.session.alive
    pool.close()
