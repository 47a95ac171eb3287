"""An interactive session with a program, in a sandbox whose monitor is ours."""

import contextlib
import os
import select
import socket
from collections.abc import Callable

from rollgym.sandbox.core.result import Outcome, RunResult
from rollgym.sandbox.supervisor.frames import Frame, FrameError, receive_frame

_CHUNK = 1 << 16


class SupervisedSession:
    """The server's end of a session. One thread at a time may use it; any may hang up.

    Args:
        connection: To the monitor, which answers once, at the end.
        to_program: The writing end of the program's input.
        from_program: The reading end of its output.
        result: Makes a result of the monitor's answer.
    """

    def __init__(
        self,
        connection: socket.socket,
        to_program: int,
        from_program: int,
        result: Callable[[Frame | None], RunResult],
    ) -> None:
        self._connection, self._to_program, self._from_program = connection, to_program, from_program
        self._make_result = result
        self._result: RunResult | None = None

    def write(self, data: bytes) -> None:
        """Write to the program's standard input.

        Raises:
            BrokenPipeError: If it has ended.
        """
        if self._result is not None:
            raise BrokenPipeError("the session is closed")
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._to_program, rest) :]

    def read(self, timeout_seconds: float) -> bytes:
        """Return new output as soon as there is some; empty at the end or at the time-out."""
        if self._result is not None:
            return b""
        return os.read(self._from_program, _CHUNK) if _readable(self._from_program, timeout_seconds) else b""

    @property
    def alive(self) -> bool:
        """Whether the program is still running."""
        return self._result is None and not _readable(self._connection.fileno(), 0.0)

    def hang_up(self) -> None:
        """End the program, from any thread; who writes to it hears that it has ended."""
        # From here on the monitor reads the end of our stream, and ends the run; its answer still comes.
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)

    def close(self) -> RunResult:
        """End the program, and everything that it started; return its result."""
        if self._result is None:
            self.hang_up()
            try:
                self._result = self._make_result(receive_frame(self._connection))
            except (OSError, FrameError) as error:
                self._result = RunResult(outcome=Outcome.SANDBOX_ERROR, detail=f"{error}")
            finally:
                self._connection.close()
                os.close(self._to_program)
                os.close(self._from_program)
        return self._result


def _readable(descriptor: int, timeout_seconds: float) -> bool:
    # Servers have more descriptors than select() can look at.
    watched = select.poll()
    watched.register(descriptor, select.POLLIN)
    return bool(watched.poll(1000 * max(0.0, timeout_seconds)))
