"""Servers as child processes, what they use of the machine, and what machine it is."""

import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from rollgym.clients.measuring.revision import revision

ROOT = Path(__file__).resolve().parents[2]
_START_TIMEOUT_S = 120.0
_VERSIONED = (
    *("rollgym", "openenv", "nemo-gym", "fhaviary", "openreward"),
    *("fastapi", "starlette", "uvicorn", "uvloop", "httptools", "websockets", "orjson", "pydantic"),
    *("gymnasium", "numpy"),
)


class Server(NamedTuple):
    port: int
    pid: int


_USABLE = sorted(os.sched_getaffinity(0))
SERVER_CORE, LOAD_CORE = _USABLE[0], _USABLE[-1]


def pin_load() -> None:
    """Keep this process, and clients that it starts, off the servers' core."""
    os.sched_setaffinity(0, {LOAD_CORE})


def environment(root: Path = ROOT) -> dict[str, str]:
    """Variables for the interpreters: peers need this repository's environments, and leave no traces in it."""
    return os.environ | {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}


@contextmanager
def server(command: Sequence[str], root: Path = ROOT) -> Iterator[Server]:
    """Run a server on the servers' core that prints `serving on http://HOST:PORT` when it is ready.

    Args:
        command: What starts it.
        root: The checkout whose code it is.
    """
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment(root),
            # `-m` looks into the directory of the command first.
            cwd=None if root == ROOT else root,
            preexec_fn=lambda: os.sched_setaffinity(0, {SERVER_CORE}),
        )
        try:
            yield Server(_port(process, output), process.pid)
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _port(process: "subprocess.Popen[bytes]", output: Any) -> int:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while True:
        output.seek(0)
        text = output.read()
        found = re.search(r"serving on http://[^:]+:(\d+)", text)
        if found is not None:
            return int(found.group(1))
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{process.args!r} did not start: {text[-2000:]}")
        time.sleep(0.05)


def cpu_seconds(pid: int) -> float:
    """CPU time of a process and of its living descendants."""
    return sum(cpu_seconds_alone(member) for member in tree(pid))


def cpu_seconds_alone(pid: int) -> float:
    """CPU time of one process."""
    with open(f"/proc/{pid}/stat", "rb") as stat:
        fields = stat.read().rpartition(b")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_kib(pid: int) -> int:
    """Resident memory of a process and of its living descendants."""
    total = 0
    for member in tree(pid):
        with open(f"/proc/{member}/statm", "rb") as statm:
            total += int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024
    return total


def threads(pid: int) -> int:
    """Threads of a process and of its living descendants."""
    return sum(len(os.listdir(f"/proc/{member}/task")) for member in tree(pid))


def tree(pid: int) -> list[int]:
    """A process and its living descendants."""
    members = [pid]
    for member in members:
        for task in os.listdir(f"/proc/{member}/task"):
            try:
                with open(f"/proc/{member}/task/{task}/children") as children:
                    members.extend(int(child) for child in children.read().split())
            except FileNotFoundError:  # the thread has just ended
                continue
    return members


def allow_many_files() -> None:
    """Raise the limit of open files as far as it goes; servers inherit it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def load_average() -> float:
    return round(os.getloadavg()[0], 2)


def machine() -> dict[str, Any]:
    """The CPU, and the commit that is measured."""
    model = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return {
        "cpu": model.group(1) if model else "unknown",
        "cpus": os.cpu_count(),
        "commit": revision(),
        "changed_files": _changed_files(),
    }


def _changed_files() -> list[str]:
    if revision() == "unknown":
        return []
    command = ["git", "status", "--porcelain", "--", "clients", "env_server", "envs"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()


def versions(pythons: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """What is installed for each interpreter."""
    script = (
        "import importlib.metadata as m, json, platform, sys\n"
        "found = {'python': platform.python_version()}\n"
        "for name in sys.argv[1:]:\n"
        "    try: found[name] = m.version(name)\n"
        "    except m.PackageNotFoundError: pass\n"
        "print(json.dumps(found))"
    )
    return {
        label: json.loads(subprocess.check_output([python, "-c", script, *_VERSIONED], text=True))
        for label, python in {"rollgym": sys.executable, **pythons}.items()
    }
