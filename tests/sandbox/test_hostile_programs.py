"""Hostile programs of every class against every back-end that works here; all of one back-end run at the same time."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from rollgym.sandbox.core.base import Outcome, Program, RunResult, Sandbox
from rollgym.sandbox.core.languages import host_toolchain
from rollgym.sandbox.core.limits import Limits
from tests.sandbox.conftest import Host
from tests.support.hostile_programs import ALL, Hostile
from tests.support.processes import running

_AT_ONCE = 3
# What another configuration has shown already of the code that they share is not shown again.
_LEFT_OUT = {
    "namespaces-watched": ("secrets", "network", "privileges", "output", "compiling", "results"),
    "bubblewrap": ("memory", "output", "compiling"),
    "landlock": ("memory", "output", "compiling"),
    # What a server keeps to, its own back-end shows; here nothing is lost on the way.
    "remote": ("processes", "memory", "room", "secrets", "network", "privileges", "compiling"),
}


@pytest.fixture(scope="module")
def answers(configuration: str, sandbox: Sandbox, host: Host) -> Iterator[Mapping[str, "Future[RunResult]"]]:
    """Run all of them, a few at a time."""
    told = json.dumps(host.told(sandbox.name)).encode() + b"\n"
    host.secret.write_text(host.token)

    def run(hostile: Hostile) -> RunResult:
        return sandbox.run(
            hostile.program, files=hostile.files, stdin=told, limits=hostile.limits, collect=hostile.collect
        )

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        left_out = _LEFT_OUT.get(configuration, ())
        wanted = [
            name for name in ALL if not name.startswith(left_out) and _promised(name, ALL[name], sandbox)
        ]
        yield {name: pool.submit(run, ALL[name]) for name in wanted}


def _promised(name: str, hostile: Hostile, sandbox: Sandbox) -> bool:
    seen = sandbox.probe()
    # Without that guarantee, a signal to everyone would end this test.
    signals = name.startswith("processes: signals") and not seen.processes
    compiled = hostile.program.language == "cpp" and host_toolchain().cxx is None
    disk = hostile.bounded_disk is None or hostile.bounded_disk is seen.disk
    return disk and sandbox.name not in hostile.not_for and not signals and not compiled


@pytest.mark.parametrize("name", ALL)
def test_a_hostile_program_achieves_nothing(
    name: str, sandbox: Sandbox, answers: Mapping[str, "Future[RunResult]"], host: Host
) -> None:
    if name not in answers:
        pytest.skip(f"{sandbox.name} does not promise this, or another one has shown it")
    # A program that leaves others running ends by itself: if its answer waited for them, it would be the time limit's.
    result, hostile = answers[name].result(), ALL[name]
    assert result.outcome is not Outcome.SANDBOX_ERROR, result.detail
    if hostile.outcomes is None:
        assert result.outcome is Outcome.OK, (result.detail, result.stderr[-500:])
        achieved = json.loads(result.stdout)
        assert not any(achieved.values()), [what for what, done in achieved.items() if done]
    else:
        assert result.outcome in hostile.outcomes, (result.detail, result.stderr[-500:])
    assert len(result.stdout) <= hostile.limits.output_kb << 10
    assert host.token.encode() not in result.stdout + result.stderr
    assert not set(result.files) - {"plain"}


def test_the_host_is_as_it_was(answers: Mapping[str, "Future[RunResult]"], host: Host, scratch: Path) -> None:
    for answer in answers.values():
        answer.result()
    assert host.sentinel.poll() is None
    assert host.secret.read_text() == host.token
    host.udp.setblocking(False)
    with pytest.raises(BlockingIOError):
        host.udp.recv(64)
    assert _running(host.duration) == []
    # An answer does not wait for the removal of what may be deep; it follows.
    deadline = time.monotonic() + 20
    while (left := list(scratch.iterdir())) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []


def test_a_server_inside_is_not_reached_from_outside(sandbox: Sandbox, host: Host) -> None:
    source = (
        "import socket, time\n"
        f"try: server = socket.create_server(('0.0.0.0', {host.free_port}))\n"
        "except OSError: pass\n"
        "print('up', flush=True); time.sleep(30)"
    )
    session = sandbox.open_session(Program("python", source), limits=Limits(wall_seconds=20))
    try:
        assert session.read(15) == b"up\n"
        with socket.socket() as client:
            assert client.connect_ex(("127.0.0.1", host.free_port)) != 0
    finally:
        session.close()


def test_a_second_run_finds_nothing_of_the_first(sandbox: Sandbox) -> None:
    plant = """
import os, sysconfig
places = [".", os.environ["HOME"], os.environ["TMPDIR"], "/tmp", "/dev/shm", "/var/tmp"]
places.append(sysconfig.get_paths()["purelib"])
for place in places:
    for name in ("sitecustomize.py", "json.py", ".bashrc", "usercustomize.py", "planted"):
        try:
            with open(os.path.join(place, name), "w") as file: file.write("print('planted')")
        except OSError: pass
print("done")
"""
    look = """
import os, json, tempfile
found = [place for place in (".", "/tmp", "/dev/shm", "/var/tmp", os.environ["TMPDIR"], os.environ["HOME"])
         if os.path.exists(os.path.join(place, "planted"))]
print(found, json.__file__.startswith("/usr"))
"""
    assert sandbox.run(Program("python", plant)).stdout == b"done\n"
    assert sandbox.run(Program("python", look)).stdout == b"[] True\n"


def test_runs_at_the_same_time_have_limits_of_their_own(sandbox: Sandbox) -> None:
    source = """
import os, time
count = 0
try:
    while count < 40:
        if os.fork() == 0:
            time.sleep(20)
            os._exit(0)
        count += 1
except OSError:
    pass
print(count)
"""
    limits = Limits(pids=16, wall_seconds=10)
    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(lambda _: sandbox.run(Program("python", source), limits=limits), range(3)))
    counts = [int(result.stdout) for result in results]
    # Where threads of one user are counted together, as many as there were at the start of a run come on top.
    lowest, highest = (12, 16) if sandbox.probe().level == "namespaces" or os.geteuid() == 0 else (1, 40)
    assert all(lowest <= count <= highest for count in counts), counts


def test_a_closed_sandbox_starts_again(sandbox: Sandbox) -> None:
    sandbox.close()
    assert sandbox.run(Program("bash", "echo again")).stdout == b"again\n"


def test_a_killed_server_takes_its_runs_with_it(host: Host) -> None:
    """Nobody is left to close anything, and still everything ends."""
    duration = f"{host.duration}7"
    source = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from rollgym.sandbox.core.base import Program
from rollgym.sandbox.selection import open_sandbox
session = open_sandbox().open_session(Program("bash", "sleep {duration} & echo up; wait"))
print(session.read(20).decode(), flush=True)
sys.stdin.read()
"""
    command = [sys.executable, "-c", source]
    with running(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)) as server:
        assert server.stdout is not None
        if server.stdout.readline() != b"up\n":
            pytest.skip("no sandbox works here")
        assert _running(f"sleep {duration}")
        server.kill()
    deadline = time.monotonic() + 20
    while _running(f"sleep {duration}") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert _running(f"sleep {duration}") == []


def _running(word: str) -> list[str]:
    """Return the command lines on this machine that hold a word."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if word in line and str(os.getpid()) not in path.parts:
            found.append(line)
    return found
