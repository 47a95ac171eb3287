"""A session that has ended before it began."""

from sandbox.core.result import RunResult


class EndedSession:
    """See `SandboxSession`: there is nobody to write to, and nothing to read.

    Args:
        result: Why.
    """

    def __init__(self, result: RunResult) -> None:
        self._result = result

    def write(self, data: bytes) -> None:
        """Find nobody to write to.

        Raises:
            BrokenPipeError: Always.
        """
        raise BrokenPipeError(f"the program did not begin: {self._result.detail}")

    def read(self, timeout_seconds: float) -> bytes:
        """Return nothing."""
        return b""

    @property
    def alive(self) -> bool:
        """Whether the program runs: it does not."""
        return False

    def close(self) -> RunResult:
        """Return what became of it."""
        return self._result
