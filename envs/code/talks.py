"""A sandbox session that is spoken to turn by turn."""

import time
from collections.abc import Mapping
from typing import Any

import orjson

from envs.code.bundle import program
from envs.code.conversation import Lines
from envs.code.faults import GraderFaultError, raise_faults
from sandbox.core.base import Sandbox
from sandbox.core.limits import Limits

_LONGEST_SESSION = 6 * 3600.0


class SandboxEndedError(Exception):
    """What was run in a session has ended the sandbox that it ran in, or keeps it from answering."""


class Talk:
    """One of our own programs in a sandbox, from the first turn of an episode to its last.

    Args:
        sandbox: Where it runs.
        name: The module of `envs.code.inside`.
        files: Laid into its working directory.
        memory_mb: MiB of all that runs in it.
    """

    def __init__(self, sandbox: Sandbox, name: str, files: Mapping[str, bytes], memory_mb: int) -> None:
        # A policy may think for long between two turns.
        limits = Limits(wall_seconds=_LONGEST_SESSION, memory_mb=memory_mb, output_kb=64 * 1024)
        self._session = sandbox.open_session(program(name), files=files, limits=limits)

    def tell(self, data: Mapping[str, Any]) -> None:
        """Send a line that has no answer.

        Raises:
            GraderFaultError: The sandbox is gone.
        """
        if not Lines(self._session, 0.0).send(data):
            raise GraderFaultError(f"the sandbox session has not begun: {self._gone()}")

    def ask(self, data: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Send a line and return what is answered.

        Raises:
            SandboxEndedError: There is no answer, since what was run has ended the sandbox.
            GraderFaultError: The sandbox failed.
        """
        lines = Lines(self._session, time.monotonic() + seconds)
        line = lines.receive() if lines.send(data) else b""
        try:
            answer = orjson.loads(line)
        except orjson.JSONDecodeError:
            raise self._gone() from None
        if not isinstance(answer, dict):
            raise self._gone()
        return answer

    def close(self) -> None:
        """End all that runs in it."""
        self._session.close()

    def _gone(self) -> SandboxEndedError:
        result = self._session.close()
        raise_faults(result)
        return SandboxEndedError(f"{result.outcome.value}: {result.detail}")
