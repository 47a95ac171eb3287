"""Internal errors: described by file and line, with the traceback in the run's directory."""

import re
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path

from rollgym.trainer.config.run import RunSettings
from rollgym.trainer.core.errors import TrainerError
from rollgym.trainer.core.plugins import one_line

TRACEBACK_FILE = "traceback.txt"
"""The name of the last error's traceback in a run's directory."""
_SHORT_OF_MEMORY = re.compile(r"out of memory|OutOfMemoryError|MemoryError|can't allocate memory")


def described(error: BaseException) -> str:
    """Return an error's class, message, file and line, on one line."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {one_line(error)}{place}"


def is_short_of_memory(error: BaseException) -> bool:
    """Whether a device or this machine had no memory left, here or in a rank: torch says so in several ways."""
    if isinstance(error, MemoryError) or any(
        each.__name__ == "OutOfMemoryError" for each in type(error).__mro__
    ):
        return True
    return isinstance(error, RuntimeError) and _SHORT_OF_MEMORY.search(str(error)) is not None


def memory_does_not_suffice(settings: RunSettings, error: BaseException, remedies: Sequence[str]) -> str:
    """Return a line that says what had too little memory, and what takes less; its traceback is kept."""
    where = described(error) if not isinstance(error, TrainerError) else str(error)
    return (
        f"memory does not suffice: {where}; traceback in {keep_traceback(settings, error)}; "
        f"{', or '.join(remedies)}; --dry-run tells what takes how much"
    )


def remedies_of_playing(settings: RunSettings) -> list[str]:
    """Return the settings that lower the memory of episodes, if nothing is trained."""
    count = settings.rollout.max_concurrent_sequences
    less = [f"lower rollout.max_concurrent_sequences (it is {count})"]
    if settings.model.dtype == "fp32":
        less.append("set model.dtype=bf16")
    return less


def keep_traceback(settings: RunSettings | None, error: BaseException) -> Path:
    """Write an error's traceback into the run's directory, or, if that is not writable, into a temporary file.

    Args:
        settings: The run; None if its settings were not read.
        error: The exception.

    Returns:
        The file.
    """
    text = "".join(traceback.format_exception(error))
    if settings is not None:
        file = Path(settings.output_dir) / TRACEBACK_FILE
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8", errors="backslashreplace")
        except OSError:
            pass  # a full disk, for example, may be the very error
        else:
            return file
    with tempfile.NamedTemporaryFile(prefix="roll-train-", suffix=".txt", delete=False) as other:
        other.write(text.encode(errors="backslashreplace"))
    return Path(other.name)
