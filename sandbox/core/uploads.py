"""The initial files of a run, under the limits of its own writes; if they do not fit, it never begins."""

from collections.abc import Mapping

from rollgym.sandbox.core.base import Outcome, Program, RunResult
from rollgym.sandbox.core.limits import Limits

_PAGE = 4096
_MIB = 1 << 20


def refused(program: Program, files: Mapping[str, bytes], limits: Limits) -> RunResult | None:
    """Return the outcome of a run whose files have no room in its working directory; None if there is room.

    Every back-end calls this before it starts anything, so that the outcome is the same everywhere.

    Args:
        program: Its source is a file like the others.
        files: By relative path.
        limits: `disk_mb` and `inodes` bound them.
    """
    sizes = [len(program.source.encode(errors="surrogateescape")), *map(len, files.values())]
    # A file takes whole pages.
    used = sum(-(-size // _PAGE) * _PAGE for size in sizes)
    folders = {name[:index] for name in files for index, sign in enumerate(name) if sign == "/"}
    if used <= limits.disk_mb * _MIB and len(sizes) + len(folders) <= limits.inodes:
        return None
    return too_large(
        f"{len(sizes) + len(folders)} files and directories with {used / _MIB:.1f} MiB in all, and there is room for "
        f"{limits.inodes} with {limits.disk_mb} MiB"
    )


def too_large(reason: str) -> RunResult:
    """Return the outcome of a run that was given more than there is room for."""
    return RunResult(
        outcome=Outcome.DISK_LIMIT, detail=f"what it was given to begin with is too large: {reason}"
    )


class EndedSession:
    """A `SandboxSession` that has ended already: it accepts no input and has no output.

    Args:
        result: The result that says why it ended.
    """

    def __init__(self, result: RunResult) -> None:
        self._result = result

    def write(self, data: bytes) -> None:
        """Refuse the input, since the program has ended.

        Raises:
            BrokenPipeError: Always.
        """
        raise BrokenPipeError(f"the program did not begin: {self._result.detail}")

    def read(self, timeout_seconds: float) -> bytes:
        """Return no output, since nothing ran."""
        return b""

    @property
    def alive(self) -> bool:
        """Whether the program runs: it does not."""
        return False

    def close(self) -> RunResult:
        """Return the result that says why."""
        return self._result
