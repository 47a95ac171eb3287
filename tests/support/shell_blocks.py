"""Blocks for a shell, typed command by command as a reader types them: what serves runs on while the next is typed."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from tests.support.processes import end, end_with_parent
from tests.support.typed_commands import programs_of, statements_of

RUN = frozenset(
    {
        *("curl", "export", "kill", "pip", "printf", "python", "redis-server"),
        *("roll-agent-proxy", "roll-env", "roll-serve", "roll-train"),
    }
)
"""Programs that a test types. Others change the machine or the repository, or ask for machines that a test has not."""

_LIMIT_S = 120.0


class _Kind(NamedTuple):
    """A kind of server.

    Attributes:
        typed: What it is started with.
        ready: What it says when it is ready; one that says nothing is ready once it listens.
        code: Its exit code when it is told to end.
    """

    typed: re.Pattern[str]
    ready: re.Pattern[str] | None
    code: int = 0


_KINDS = (
    _Kind(re.compile(r"roll-serve(?! token)"), re.compile(r"rollgym serving on http")),
    _Kind(re.compile(r"roll-env register .*--keep"), re.compile(r"\w")),
    _Kind(
        re.compile(r"roll-train report .*--serve"), re.compile(r"follows the run on http"), -signal.SIGTERM
    ),
    _Kind(re.compile(r"redis-server"), re.compile(r"Ready to accept connections")),
    _Kind(re.compile(r"python examples/http_environment\.py"), None, -signal.SIGTERM),
)
_DEFAULT_PORTS = {"roll-serve": 8000, "redis-server": 6379}
_OWN_PORT = re.compile(r"--port (\d+)|http_environment\.py (\d+)")
_PORTS = re.compile(r"((?:127\.0\.0\.1|localhost):|--port |http_environment\.py )(\d+)")
_DIRECTORIES = re.compile(r"(?<![\w.])/(?=(?:srv|var/cache|var/lib)/)")
"""Of a reader's machine: they lie in the reader's folder here."""

# A reader sees what curl and pip say, and a test their exit codes. What pip would install is there: where the
# development environment lacks an extra, it fails. A reader is in a clone, `.`, which is what is installed here.
_PRELUDE = """
curl() { command curl --silent --show-error --fail-with-body "$@"; }
pip() { python -m pip "${@/#./rollgym}" --quiet --no-index --dry-run; }
if [ -e .exported ]; then . ./.exported; fi
"""
_AFTERWARDS = "\nexport -p > .exported\n"


def not_to_be_run(text: str) -> list[str]:
    """The programs of a block that no test types."""
    return sorted({each for each in programs_of(text) if each not in RUN})


class Terminal:
    """A shell in a folder, whose ports and directories are none that others have.

    Args:
        folder: Where commands are typed.

    Attributes:
        variables: What a reader has set, beside the variables of the test.
        ports: Which port stands for one that is typed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        own = {"PATH": path, "PYTHONUNBUFFERED": "1", "BROWSER": "true"}
        self.variables = os.environ | own
        self.ports: dict[int, int] = {}
        self._servers: list[_Server] = []

    def type_block(self, text: str, answers: Mapping[str, str]) -> None:
        """Type the commands of a block, one after the other.

        Args:
            text: The block.
            answers: What is put in at commands that ask, by what stands in the command.
        """
        for statement in statements_of(text):
            answer = next((text for part, text in answers.items() if part in statement), "")
            self.type(statement, answer)

    def type(self, statement: str, answer: str = "") -> str:
        """Type a command; gives what it printed, of a server until it was ready.

        Raises:
            AssertionError: Its exit code is another than 0, or it takes too long, or it ends before it is ready.
        """
        statement = statement.rstrip().removesuffix("&").rstrip()
        kind = next((each for each in _KINDS if each.typed.match(statement)), None)
        if kind is None:
            return self._run(self._placed(statement), answer)
        return self._serve(statement, kind)

    def end(self) -> None:
        """End the servers, the newest first; each ends in order."""
        while self._servers:
            self._servers[-1].end()
            self._servers.pop()

    def pid(self) -> int:
        """The process id of the newest server."""
        return self._servers[-1].process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.end()
        finally:
            for server in self._servers:
                server.kill()

    def _placed(self, statement: str) -> str:
        """The command with the ports and directories that stand for those of the page."""
        statement = _DIRECTORIES.sub(f"{self._folder}/", statement)
        return _PORTS.sub(lambda found: f"{found[1]}{self._port(int(found[2]))}", statement)

    def _port(self, typed: int) -> int:
        if typed not in self.ports:
            with socket.create_server(("127.0.0.1", 0)) as free:
                self.ports[typed] = free.getsockname()[1]
        return self.ports[typed]

    def _popen(self, script: str, stdin: int, stderr: int) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", "-e", "-o", "pipefail", "-c", f"{_PRELUDE}{script}"],
            cwd=self._folder,
            env=self.variables,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=end_with_parent,
        )

    def _run(self, statement: str, answer: str) -> str:
        with self._popen(f"{statement}{_AFTERWARDS}", subprocess.PIPE, subprocess.STDOUT) as process:
            try:
                printed, _ = process.communicate(answer, timeout=_LIMIT_S)
            except subprocess.TimeoutExpired:
                raise AssertionError(f"{statement}: it has not ended after {_LIMIT_S:g} s") from None
            finally:
                _kill_group(process.pid)
        assert process.returncode == 0, f"{statement}: exit code {process.returncode}\n{printed}"
        return printed

    def _serve(self, statement: str, kind: _Kind) -> str:
        program = statement.partition(" ")[0]
        if program in _DEFAULT_PORTS and "--port " not in statement:
            statement = statement.replace(program, f"{program} --port {_DEFAULT_PORTS[program]}", 1)
        own = _OWN_PORT.search(statement)
        typed = int(own[1] or own[2]) if own else 0
        # A server where one runs already is an alternative to it.
        for server in [each for each in self._servers if own and each.port == typed]:
            self._servers.remove(server)
            server.end()
        if own:
            self.ports.pop(typed, None)
        statement = self._placed(statement)
        log = self._folder / f"server-{len(list(self._folder.glob('server-*')))}.log"
        with log.open("w") as errors:
            process = self._popen(f"exec {statement}", subprocess.DEVNULL, errors.fileno())
        server = _Server(statement, kind, typed, process, log)
        try:
            printed = server.wait_until_ready(self.ports.get(typed, 0))
        except BaseException:
            server.kill()
            raise
        self._servers.append(server)
        return printed


class _Server:
    """A server that a command has started, in a process group of its own."""

    def __init__(
        self, statement: str, kind: _Kind, port: int, process: subprocess.Popen[str], log: Path
    ) -> None:
        self._statement = statement
        self._kind = kind
        self.port = port
        self.process = process
        self._log = log

    def wait_until_ready(self, port: int) -> str:
        """Wait for the line that says that it is ready, or until it listens; gives what it has printed."""
        if self._kind.ready is None:
            while not _listens(port):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(0.02)
                    raise AssertionError(self._told("it ended before it listened"))
            return ""
        assert self.process.stdout is not None
        printed = ""
        limit = threading.Timer(_LIMIT_S, self.kill)
        limit.start()
        try:
            for line in self.process.stdout:
                printed += line
                if self._kind.ready.search(line):
                    return printed
        finally:
            limit.cancel()
        raise AssertionError(self._told(f"it ended before it was ready\n{printed}"))

    def end(self) -> None:
        """End it as an operator does, and hold its exit code against the one of those that end in order."""
        early = self.process.poll()
        code = end(self.process)
        self.kill()
        assert early is None, self._told(f"it ended by itself, with exit code {early}")
        assert code == self._kind.code, self._told(f"exit code {code}")

    def kill(self) -> None:
        """End all that it has started."""
        _kill_group(self.process.pid)
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def _told(self, what: str) -> str:
        return f"{self._statement}: {what}\n{self._log.read_text(errors='replace')}"


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _listens(port: int) -> bool:
    with socket.socket() as asking:
        return asking.connect_ex(("127.0.0.1", port)) == 0
