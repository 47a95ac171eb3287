"""A server of our own, on loopback, for as long as a command needs it."""

from __future__ import annotations

import os
import queue
import re
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import IO, Self

from rollgym.clients.process.modules import python_module

_READY = re.compile(r"rollgym serving on (http\S+)")
_START_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 30.0


class LocalServer:
    """Runs `python -m rollgym.env_server` on a free port of this machine.

    Args:
        arguments: More of its command line.
        environment: Variables that its processes see beside those of this one.

    Attributes:
        url: Its address, once it is entered.
        process: The process.
    """

    def __init__(self, arguments: Sequence[str] = (), environment: Mapping[str, str] | None = None) -> None:
        self._arguments = list(arguments)
        self._environment = os.environ | (environment or {})
        self.url = ""

    def __enter__(self) -> Self:
        """Start it and wait until it is ready.

        Raises:
            ConnectionError: The server ended, or did not get ready; the message contains its output.
        """
        self._log: IO[bytes] = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            python_module("rollgym.env_server", "--port", "0", *self._arguments),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=self._environment,
            text=True,
        )
        lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, args=(lines,), daemon=True).start()
        try:
            self.url = self._wait_until_ready(lines)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    @property
    def log(self) -> str:
        """The server's output on stderr."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def _read(self, lines: queue.SimpleQueue[str | None]) -> None:
        """Pass its output on, and keep its pipe empty afterwards."""
        for line in self.process.stdout or ():
            lines.put(line)
        lines.put(None)

    def _wait_until_ready(self, lines: queue.SimpleQueue[str | None]) -> str:
        while True:
            try:
                line = lines.get(timeout=_START_TIMEOUT_S)
            except queue.Empty:
                raise ConnectionError(
                    f"the server was not ready within {_START_TIMEOUT_S:g} s:\n{self.log}"
                ) from None
            if line is None:
                raise ConnectionError(f"the server did not start:\n{self.log.strip()}")
            ready = _READY.search(line)
            if ready:
                return ready.group(1)

    def _stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        self._log.close()
