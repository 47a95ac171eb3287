"""Real servers and real runs, as a user starts them."""

import contextlib
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from tests.support.preloaded import SERVE, TRAIN, Forked, can_be_forked, fork

Process = TypeVar("Process", "subprocess.Popen[str]", "subprocess.Popen[bytes]", Forked)
ROOT = Path(__file__).parents[2]


def end(process: "subprocess.Popen[Any] | Forked", patience_s: float = 30.0) -> int:
    """End a process as an operator would, and for good where that does not help; gives its exit code."""
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(patience_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    assert process.returncode is not None
    return process.returncode


def end_with_parent() -> None:
    """Have the kernel kill this process when the one that started it has ended, however that ends."""
    set_parent_death_signal = 1
    ctypes.CDLL(None, use_errno=True).prctl(set_parent_death_signal, signal.SIGKILL)


def kill_module(module: str, place: Path) -> bool:
    """Kill a process that runs a module, and that is told a path below `place`; False where there is none."""
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if ["-m", module] in (words[1:3], words[2:4]) and any(each.startswith(f"{place}/") for each in words):
            os.kill(int(entry.name), signal.SIGKILL)
            return True
    return False


@contextlib.contextmanager
def running(process: Process) -> Iterator[Process]:
    """End a process with the block, however the block ends.

    `with Popen(...)` alone waits for it: after a failed assertion inside, for ever.
    """
    with process:
        try:
            yield process
        finally:
            end(process)


def start_server(
    *arguments: str, stdin: int = subprocess.DEVNULL, stderr: int | None = None
) -> "Forked | subprocess.Popen[str]":
    """Start `roll-serve` with its output captured.

    Args:
        arguments: Its arguments.
        stdin: Its input, as `Popen` takes it.
        stderr: Its errors, as `Popen` takes them.
    """
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    # What a server answers is not to depend on what else the machine does, but where that is what is tested.
    arguments = ("--max-queue-s", "60", *arguments)
    if can_be_forked(SERVE, environment):
        return fork(SERVE, arguments, environment, stdin=stdin, stderr=stderr)
    return subprocess.Popen(
        [sys.executable, "-m", "rollgym.env_server", *arguments],
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        cwd=ROOT,
        env=environment,
    )


@contextlib.contextmanager
def env_server(*arguments: str) -> Iterator[str]:
    """Run `roll-serve` on a free loopback port and give its URL."""
    with running(start_server("--port", "0", *arguments)) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if match := re.search(r"rollgym serving on (http://\S+)", line):
                yield match.group(1)
                break
        else:
            raise RuntimeError("the server ended before it was ready")


def start_training(*arguments: str, fresh: bool = False) -> "Forked | subprocess.Popen[str]":
    """Start `roll-train` with its output captured.

    Args:
        arguments: Its arguments.
        fresh: Whether it has to import all that it needs by itself, and to have a hash seed of its own.
    """
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    if not fresh and can_be_forked(TRAIN, environment):
        return fork(TRAIN, arguments, environment)
    return subprocess.Popen(
        [sys.executable, "-m", "rollgym.trainer.cli", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env=environment,
    )


def start_agent_proxy(*arguments: str, stderr: int | None = None) -> "Forked | subprocess.Popen[str]":
    """Start `roll-agent-proxy` with its output captured.

    Args:
        arguments: Its arguments.
        stderr: Its errors, as `Popen` takes them.
    """
    module, environment = "rollgym.trainer.run.agent_proxy", os.environ | {"PYTHONUNBUFFERED": "1"}
    if can_be_forked(TRAIN, environment):
        return fork(TRAIN, arguments, environment, stderr=stderr, main=module)
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        cwd=ROOT,
        env=environment,
    )


def train(*arguments: str, fresh: bool = False) -> str:
    """Run `roll-train` to its end and return what it printed."""
    with running(start_training(*arguments, fresh=fresh)) as process:
        output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return output


def train_until(text: str, *arguments: str) -> None:
    """Run `roll-train` until it prints a line with `text`, and kill it there."""
    with running(start_training(*arguments)) as process:
        assert process.stdout is not None
        assert any(text in line for line in process.stdout), f"it never said {text!r}"
        process.kill()
        process.communicate()


def refused(*arguments: str) -> str:
    """Run `roll-train` on something that it refuses; gives all that it printed."""
    with running(start_training(*arguments)) as process:
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 2, output
    assert "Traceback" not in output
    return output


def read_lines(path: Path) -> list[dict]:
    """Read a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def descendants(process: int) -> Iterator[tuple[int, bytes]]:
    """Yield the processes below one with their command lines, those nearest to it first."""
    parents: dict[int, int] = {}
    commands: dict[int, bytes] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            commands[int(folder.name)] = (folder / "cmdline").read_bytes()
        except OSError:
            continue
    below = [process]
    for parent in below:
        children = [pid for pid, each in parents.items() if each == parent]
        below += children
        yield from ((pid, commands[pid]) for pid in children if pid in commands)
