"""Control groups of both versions: where they are looked for, and what is written and read."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollgym.sandbox.supervisor.cgroups import (
    ControlGroup,
    Parents,
    Usage,
    candidates,
    find_parents,
    unique_name,
)

_V1_MOUNTS = """\
25 24 0:22 / /proc rw,relatime shared:1 - proc proc rw
30 24 0:26 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
31 24 0:27 / /sys/fs/cgroup/pids rw,relatime - cgroup cgroup rw,pids
32 24 0:28 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
"""
_V2_MOUNTS = (
    "30 24 0:26 / /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
)
_IN_A_CONTAINER = """\
30 24 0:26 /docker/abc /sys/fs/cgroup/memory ro,relatime - cgroup cgroup rw,memory
31 24 0:27 /docker/abc /sys/fs/cgroup/pids ro,relatime - cgroup cgroup rw,pids
"""


@pytest.mark.parametrize(
    ("own", "mounts", "expected"),
    [
        ("8:pids:/\n4:memory:/jobs/a\n0::/\n", _V1_MOUNTS,
         [Parents(1, "/sys/fs/cgroup/memory/jobs/a", "/sys/fs/cgroup/pids")]),
        ("8:pids:/docker/abc\n4:memory:/docker/abc\n", _IN_A_CONTAINER,
         [Parents(1, "/sys/fs/cgroup/memory", "/sys/fs/cgroup/pids")]),
        ("0::/user.slice/run.service/server\n", _V2_MOUNTS,
         [Parents(2, "/sys/fs/cgroup/user.slice/run.service/server", "/sys/fs/cgroup/user.slice/run.service/server"),
          Parents(2, "/sys/fs/cgroup/user.slice/run.service", "/sys/fs/cgroup/user.slice/run.service")]),
        ("0::/\n", _V2_MOUNTS, [Parents(2, "/sys/fs/cgroup", "/sys/fs/cgroup")]),
        ("", "", []),
        ("0::/\n", "", []),
    ],
    ids=["version 1", "version 1 in a container", "version 2", "version 2 at the root", "none", "not mounted"],
)  # fmt: skip
def test_groups_are_looked_for_where_this_process_is(own: str, mounts: str, expected: list[Parents]) -> None:
    assert candidates(own, mounts) == expected


def test_version_2_is_written_and_read_as_the_kernel_documents_it(tmp_path: Path) -> None:
    group = ControlGroup(Parents(2, str(tmp_path), str(tmp_path)), "run")
    group.create()
    group.limit_memory(64)
    group.limit_pids(9)
    group.add(4711)
    directory = tmp_path / "run"
    written = {path.name: path.read_text() for path in directory.iterdir()}
    assert written == {
        "memory.max": str(64 << 20),
        "memory.swap.max": "0",
        "pids.max": "9",
        "cgroup.procs": "4711",
    }
    (directory / "memory.events").write_text("low 0\nhigh 0\nmax 12\noom 1\noom_kill 1\noom_group_kill 0\n")
    (directory / "pids.events").write_text("max 0\n")
    (directory / "memory.peak").write_text("1048576\n")
    assert group.usage() == Usage(memory_exhausted=True, pids_refused=False, peak_bytes=1 << 20)


def test_version_1_is_read_as_the_kernel_documents_it(tmp_path: Path) -> None:
    for name in ("memory", "pids"):
        (tmp_path / name).mkdir()
    group = ControlGroup(Parents(1, str(tmp_path / "memory"), str(tmp_path / "pids")), "run")
    group.create()
    memory, pids = tmp_path / "memory" / "run", tmp_path / "pids" / "run"
    (memory / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 0\n")
    (memory / "memory.max_usage_in_bytes").write_text("4096\n")
    (pids / "pids.events").write_text("max 3\n")
    assert group.usage() == Usage(memory_exhausted=False, pids_refused=True, peak_bytes=4096)
    group.forget_peak()
    assert (memory / "memory.max_usage_in_bytes").read_text() == "0"


@pytest.fixture
def parents() -> Iterator[Parents]:
    """Where this process really can make groups; those that the tests left behind are removed."""
    found = find_parents()
    if found is None:
        pytest.skip("this process cannot make control groups")
    yield found
    for parent in {found.memory, found.pids}:
        for group in Path(parent).glob(f"rollgym-*-{os.getpid()}*"):
            group.rmdir()


def test_groups_that_another_process_of_this_number_left_behind_are_in_nobodys_way(parents: Parents) -> None:
    for parent in {parents.memory, parents.pids}:
        for kind in ("try", "run"):
            Path(parent, f"rollgym-{kind}-{os.getpid()}").mkdir()
    assert find_parents() == parents
    groups = [ControlGroup(parents, unique_name("run")) for _ in range(2)]
    for group in groups:
        group.create()
    for group in groups:
        group.remove(patience_seconds=1)


def test_what_was_left_behind_long_ago_is_removed(parents: Parents) -> None:
    old, new = Path(parents.pids, unique_name("run")), Path(parents.pids, unique_name("run"))
    for group in (old, new):
        group.mkdir()
    yesterday = time.time() - 86_400
    os.utime(old, (yesterday, yesterday))
    assert find_parents() == parents
    assert (old.exists(), new.exists()) == (False, True)
