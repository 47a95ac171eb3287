"""Containers: how they are closed, kept, replaced and left. Needs an engine where it is marked so."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import docker
import pytest

from rollgym.sandbox.containers.docker import DockerSandbox
from rollgym.sandbox.containers.engine import LABEL
from rollgym.sandbox.containers.seccomp import build_profile
from rollgym.sandbox.core.base import Cancellation, Outcome, Program, SandboxUnavailableError
from rollgym.sandbox.core.limits import Limits
from rollgym.sandbox.kernel.seccomp import REFUSED
from rollgym.sandbox.selection import make_sandbox
from tests.support.processes import running

Make = Callable[..., DockerSandbox]


@pytest.fixture
def make() -> Iterator[Make]:
    """Make sandboxes that are closed in the end."""
    made: list[DockerSandbox] = []
    image = os.environ.get("ROLLGYM_DOCKER_IMAGE")

    def make(**options: Any) -> DockerSandbox:
        opened = make_sandbox("docker", **({} if image is None else {"image": image}), **options)
        assert isinstance(opened, DockerSandbox)
        made.append(opened)
        try:
            opened.probe()
        except SandboxUnavailableError as error:
            pytest.skip(str(error))
        return opened

    yield make
    for each in made:
        each.close()


@pytest.mark.docker
def test_files_shown_below_the_working_directory_outlive_programs(make: Make, tmp_path: Path) -> None:
    shown = tmp_path / "agent with a space"
    shown.mkdir()
    (shown / "code.py").write_text("x = 1\n")
    sandbox = make(containers=1, read_only=[str(shown)])
    assert str(shown).startswith("/tmp/"), "where programs have a file system of their own"
    read = Program("bash", f"cat '{shown}/code.py'; touch /tmp/left; ls /tmp")
    for _ in range(2):
        result = sandbox.run(read)
        assert result.outcome is Outcome.OK, result
        assert result.stdout.decode().split() == ["x", "=", "1", "left", tmp_path.parts[2]]
    sandbox.run(Program("bash", "mv /tmp/* /tmp/elsewhere"))
    assert sandbox.run(Program("bash", f"cat '{shown}/code.py'")).stdout == b"x = 1\n"


class Containers:
    """The containers that were made since this was."""

    def __init__(self) -> None:
        self._before = {container.id for container in self._all(everywhere=True)}

    def __call__(self, *, everywhere: bool = False) -> list[Any]:
        return [each for each in self._all(everywhere=everywhere) if each.id not in self._before]

    def _all(self, *, everywhere: bool) -> list[Any]:
        engine = docker.from_env()
        try:
            return list(engine.containers.list(all=everywhere, filters={"label": LABEL}))
        finally:
            engine.close()


@pytest.fixture
def containers(make: Make) -> Containers:
    """Those of this test; a sandbox that is there for all tests may have some, too."""
    make().close()
    return Containers()


@pytest.mark.docker
def test_a_container_is_given_nothing_that_it_does_not_need(make: Make, containers: Containers) -> None:
    sandbox = make(containers=1)
    assert sandbox.run(Program("bash", "true"), limits=Limits(memory_mb=100, pids=10)).outcome is Outcome.OK
    (container,) = containers()
    host, config = container.attrs["HostConfig"], container.attrs["Config"]
    assert (host["ReadonlyRootfs"], host["NetworkMode"], host["IpcMode"]) == (True, "none", "none")
    assert (host["CapDrop"], host["CapAdd"], host["Privileged"], host["Binds"]) == (
        ["ALL"],
        None,
        False,
        None,
    )
    assert host["Memory"] == host["MemorySwap"] == (100 + 32) << 20
    assert (host["PidsLimit"], host["NanoCpus"], host["LogConfig"]["Type"]) == (11, 10**9, "none")
    assert config["User"] == "65534:65534"
    writable = {place for place in host["Tmpfs"] if not place.startswith("/sys/")}
    assert writable == {"/work", "/tmp", "/dev/shm"}
    assert all("size=" in options and "nr_inodes=" in options for options in host["Tmpfs"].values())
    told = {option.partition("=")[0] for option in host["SecurityOpt"]}
    assert told == {"no-new-privileges:true", "seccomp"}


@pytest.mark.docker
def test_a_container_is_kept_until_its_runs_are_used_up_or_it_was_misused(
    make: Make, containers: Containers
) -> None:
    sandbox = make(containers=1, runs_per_container=3)
    sandbox.close()

    def used(program: Program, **limits: Any) -> tuple[Outcome, set[str]]:
        outcome = sandbox.run(program, limits=Limits(**limits)).outcome
        return outcome, {container.id for container in containers()}

    (_, first), (_, second) = used(Program("bash", "true")), used(Program("bash", "exit 1"))
    assert len(first) == 1
    assert first == second
    assert used(Program("bash", "true")) == (Outcome.OK, set()), "that was its third run"
    flood = Program("bash", "head -c 40000000 /dev/zero")
    assert used(flood) == (Outcome.OUTPUT_LIMIT, set()), "what has hit a limit is not used again"
    late, kept = used(Program("bash", "sleep 9"), wall_seconds=0.2)
    assert (late, len(kept)) == (Outcome.TIME_LIMIT, 1)
    assert used(Program("bash", "true"))[1] == kept


@pytest.mark.docker
def test_a_program_cannot_change_what_the_next_one_finds(make: Make, containers: Containers) -> None:
    sandbox = make(containers=1)
    change = """
import json, os, resource
done = []
for name, action in {
    "limits": lambda: resource.prlimit(1, resource.RLIMIT_NOFILE, (16, 16)),
    "priority": lambda: os.setpriority(os.PRIO_PROCESS, 1, 19),
    "priority of all": lambda: os.setpriority(os.PRIO_USER, 0, 19),
    "processors": lambda: os.sched_setaffinity(1, {0}),
    "score": lambda: open("/proc/1/oom_score_adj", "w").write("1000"),
    "memory": lambda: open("/proc/1/mem", "rb").read(1),
    "streams": lambda: os.open("/proc/1/fd/1", os.O_WRONLY),
    "mode": lambda: os.chmod("/work", 0) or os.mkdir("/tmp/closed", 0) or os.open("/work/x", os.O_CREAT),
}.items():
    try:
        action()
        done.append(name)
    except OSError:
        pass
os.kill(1, 9), os.kill(1, 19), os.kill(1, 15)
print(json.dumps(done))
"""
    look = "import os, resource; print(os.listdir('/tmp'), os.nice(0), resource.getrlimit(resource.RLIMIT_NOFILE))"
    before = sandbox.run(Program("python", look)).stdout
    assert b"(256, 256)" in before
    assert json.loads(sandbox.run(Program("python", change)).stdout) == []
    assert sandbox.run(Program("python", look)).stdout == before
    assert len(containers()) == 1


@pytest.mark.docker
def test_a_run_that_nobody_waits_for_ends(make: Make) -> None:
    sandbox, cancellation = make(containers=1), Cancellation()
    timer = threading.Timer(0.5, cancellation.cancel)
    timer.start()
    sandbox.run(Program("bash", "sleep 60"), limits=Limits(wall_seconds=90), cancellation=cancellation)
    timer.join()
    assert sandbox.run(Program("bash", "echo on")).stdout == b"on\n"


@pytest.mark.docker
def test_a_server_that_is_killed_leaves_nothing_that_runs(make: Make, containers: Containers) -> None:
    image = os.environ.get("ROLLGYM_DOCKER_IMAGE")
    options = "" if image is None else f"image={image!r}"
    source = f"""
from rollgym.sandbox.containers.docker import DockerSandbox
from rollgym.sandbox.core.base import Program
sandbox = DockerSandbox({options})
session = sandbox.open_session(Program("bash", "sleep 60"))
print("open", flush=True)
input()
"""
    command = [sys.executable, "-c", source]
    with running(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == b"open\n"
        (left,) = containers()
        server.kill()
    assert left.wait(timeout=30)["StatusCode"] != 1
    assert containers() == []
    make().run(Program("bash", "true"))
    assert left.id not in {container.id for container in containers(everywhere=True)}


@pytest.mark.docker
def test_an_image_that_is_not_there_is_named(make: Make) -> None:
    make()
    with pytest.raises(SandboxUnavailableError, match="docker pull nowhere/nothing:1"):
        DockerSandbox("nowhere/nothing:1").probe()


def test_without_an_engine_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    sandbox = DockerSandbox()
    with pytest.raises(SandboxUnavailableError, match="DOCKER_HOST"):
        sandbox.probe()
    result = sandbox.run(Program("bash", "true"))
    assert result.outcome is Outcome.SANDBOX_ERROR
    assert "DOCKER_HOST" in result.detail


def test_programs_in_containers_have_no_call_that_the_filter_of_namespaces_refuses() -> None:
    allowed = {name for rule in build_profile(namespaces=False)["syscalls"] for name in rule["names"]}
    allowed -= {"clone3"}  # It is listed to be answered as one that does not exist.
    assert allowed.isdisjoint(REFUSED)
    assert len(allowed) > 250
    server = {name for rule in build_profile(namespaces=True)["syscalls"] for name in rule["names"]}
    assert server - {"clone3"} - allowed == {
        *(
            "memfd_create",
            "mount",
            "mount_setattr",
            "pivot_root",
            "sethostname",
            "umount2",
            "unshare",
            "capset",
        )
    }
