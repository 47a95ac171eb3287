"""Runs an agent's program for each episode in a sandbox, which reaches the endpoint by a socket that is shown in it."""

import asyncio
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

from rollgym.sandbox.core.base import (
    CancellableSandbox,
    Cancellation,
    Outcome,
    Program,
    RunResult,
    Sandbox,
    SandboxUnavailableError,
)
from rollgym.sandbox.core.kinds import kind_named
from rollgym.sandbox.core.limits import Limits
from rollgym.sandbox.selection import open_sandbox
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.rollout.agents.runners import AgentEnd, AgentTask, ended_or_patient, last_words
from rollgym.trainer.rollout.agents.session import AgentSession

PORT = 8040
"""Port of the endpoint on 127.0.0.1 in a sandbox, whose own network has nothing else."""

_ORDER = "agent.json"
_LOOKING = """
import os, shutil, sys
print(*(path for path in sys.argv[1:] if not (os.access(path, os.R_OK) or shutil.which(path))), sep="\\n")
"""
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/lib32", "/libx32", "/proc", "/dev", "/etc")
_PIDS, _INODES, _OPEN_FILES, _KEPT_KB = 512, 16_384, 1024, 256


@dataclass(frozen=True, slots=True)
class SandboxPlan:
    """How the programs of a run are confined.

    Attributes:
        kind: The back-end, or `docker:IMAGE`.
        read_only: Read-only paths besides the system's files.
        memory_mb: MiB of memory.
        disk_mb: MiB of files.
        wall_seconds: Wall-clock limit of one program, if it is not ended before.
    """

    kind: str
    read_only: Sequence[str]
    memory_mb: int
    disk_mb: int
    wall_seconds: float

    @property
    def limits(self) -> Limits:
        """Return the limits of one program."""
        return Limits(
            wall_seconds=self.wall_seconds,
            memory_mb=self.memory_mb,
            disk_mb=self.disk_mb,
            pids=_PIDS,
            inodes=_INODES,
            open_files=_OPEN_FILES,
            output_kb=_KEPT_KB,
        )


class SandboxedRunner:
    """Runs a program for each episode in a sandbox; see `AgentRunner`.

    Args:
        sandbox: The sandbox that confines it.
        words: The command line.
        socket: The endpoint's, as the sandbox shows it.
        concurrency: Programs at one time.
        variables: Further environment variables.
        grace_s: How long it may keep running after it has reported its result.
        limits: Limits of each program.
    """

    def __init__(
        self,
        sandbox: CancellableSandbox,
        words: Sequence[str],
        socket: Path,
        concurrency: int,
        variables: Mapping[str, str],
        grace_s: float,
        limits: Limits,
    ) -> None:
        self._sandbox = sandbox
        self._words = list(words)
        self._socket = socket
        self._places = asyncio.Semaphore(concurrency)
        self._threads = ThreadPoolExecutor(concurrency, thread_name_prefix="agents")
        self._variables = dict(variables)
        self._grace_s = grace_s
        self._limits = limits
        self._program = Program(
            "python", (files("rollgym.trainer.rollout.agents") / "inside.py").read_text(), (_ORDER,)
        )

    async def run(self, task: AgentTask, session: AgentSession) -> AgentEnd:
        """Run the program in a sandbox; see `AgentRunner`."""
        async with self._places:
            cancellation = Cancellation()
            loop = asyncio.get_running_loop()
            running = loop.run_in_executor(self._threads, self._run, task, cancellation)
            finished = False
            try:
                finished = await ended_or_patient(running, session, self._grace_s)
            finally:
                cancellation.cancel()
                result = await asyncio.shield(running)
        return _end_of(result) if finished else AgentEnd()

    def _run(self, task: AgentTask, cancellation: Cancellation) -> RunResult:
        order = {
            "socket": str(self._socket),
            "port": PORT,
            "words": self._words,
            "environment": self._variables | task.variables(),
        }
        return self._sandbox.run(
            self._program,
            files={_ORDER: json.dumps(order).encode()},
            stdin=task.as_text().encode(),
            limits=self._limits,
            cancellation=cancellation,
        )

    async def close(self) -> None:
        """Close the sandboxes that are kept warm."""
        await asyncio.to_thread(self._sandbox.close)
        self._threads.shutdown()


def _end_of(result: RunResult) -> AgentEnd:
    if result.outcome is Outcome.OK and result.exit_code == 0:
        return AgentEnd()
    said = last_words(result.stdout + b"\n" + result.stderr) or "it printed nothing"
    if result.outcome is Outcome.NON_ZERO_EXIT:
        return AgentEnd(f"the agent's program ended with code {result.exit_code}: {said}")
    return AgentEnd(f"the agent's program was ended ({result.outcome.value}: {result.detail}): {said}")


def open_agent_sandbox(
    plan: SandboxPlan, words: Sequence[str], socket: Path, concurrency: int
) -> CancellableSandbox:
    """Return a probed sandbox that contains a command line's files and the endpoint's socket.

    Raises:
        ConfigError: If this machine has no such sandbox; the message has the remedy.
    """
    kind = kind_named(plan.kind)
    image = kind is not None and kind.of_images
    # An image has programs of its own, and its containers are made before they are needed.
    options: dict[str, Any] = {"containers": concurrency} if image else {}
    read_only = shown_paths([str(socket.parent), *plan.read_only], () if image else words)
    try:
        found = open_sandbox(plan.kind, minimum_level="namespaces", read_only=read_only, **options)
    except SandboxUnavailableError as error:
        raise ConfigError(f"agents.sandbox '{plan.kind}' does not work here: {error}") from error
    try:
        _require_shown(found, [*read_only, *words[:1]])
    except ConfigError:
        found.close()
        raise
    return cast(CancellableSandbox, found)


def _require_shown(sandbox: Sandbox, paths: Sequence[str]) -> None:
    """Make sure that programs can read what they are shown: they may be another user than the trainer."""
    result = sandbox.run(Program("python", _LOOKING, tuple(paths)))
    missing = result.stdout.decode(errors="replace").split("\n")[0]
    if result.outcome is not Outcome.OK or missing:
        raise ConfigError(
            f"agents.sandbox: {missing or result.detail} cannot be read there. What is not shown is not there "
            "(agents.sandbox_read_only), and programs of a sandbox are another user where the trainer is root: the "
            "folders above must let others pass"
        )


def shown_paths(paths: Iterable[str], words: Sequence[str]) -> list[str]:
    """Return what a sandbox must show beside the system's files, none of it within another.

    Args:
        paths: The paths in the settings.
        words: The command line: its program with the interpreter around it, and the files among its arguments.
    """
    wanted = {Path(path) for path in paths}
    if words and (program := shutil.which(words[0])) is not None:
        wanted |= _around(Path(program).absolute())
    wanted |= {Path(word).absolute() for word in words[1:] if os.path.isfile(word)}
    wanted = {path for path in wanted if not any(path.is_relative_to(each) for each in _SYSTEM)}
    return sorted(str(path) for path in wanted if not any(parent in wanted for parent in path.parents))


def _around(program: Path) -> set[Path]:
    """Return a program, or the interpreter's installation and the virtual environment that it belongs to."""
    found = {program}
    for path in (program, program.resolve()):
        prefix = path.parent.parent
        if (prefix / "pyvenv.cfg").is_file() or any(prefix.glob("lib/python3.*/os.py")):
            found.add(prefix)
    return found


def absolute_words(words: Sequence[str]) -> list[str]:
    """Return a command line whose program and files have their full names: a sandbox has another working directory."""
    program = shutil.which(words[0]) or words[0]
    arguments = [str(Path(word).absolute()) if os.path.isfile(word) else word for word in words[1:]]
    return [str(Path(program).absolute()) if "/" in program else program, *arguments]
