"""The limits of one run."""

from dataclasses import dataclass, fields

LONGEST_SECONDS = 1_000_000
"""The longest run. Waits are counted in milliseconds, and after 24 days the system's 32-bit counters overflow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of one run; all of a run's processes share them unless said otherwise.

    Attributes:
        wall_seconds: From the start of the program to its forced end.
        cpu_seconds: Of each process; None for as much as the wall time.
        memory_mb: MiB of all processes together, or of each if a back-end guarantees no more than that.
        pids: Processes and threads at one time.
        disk_mb: MiB of files in the working directory.
        inodes: Files and directories in the working directory.
        open_files: Descriptors of each process.
        output_kb: KiB kept of each of the two streams; further output is read and dropped.
        compile_seconds: Wall time of a compiler, which has a memory limit of its own.
        compile_memory_mb: MiB of a compiler.

    Raises:
        ValueError: If a limit is not above zero, or a time is out of all bounds.
    """

    wall_seconds: float = 10.0
    cpu_seconds: float | None = None
    memory_mb: int = 512
    pids: int = 64
    disk_mb: int = 64
    inodes: int = 4096
    open_files: int = 256
    output_kb: int = 1024
    compile_seconds: float = 30.0
    compile_memory_mb: int = 1024

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and not value > 0:
                raise ValueError(f"the limit {field.name} must be above zero, not {value!r}")
            if value is not None and field.name.endswith("_seconds") and value > LONGEST_SECONDS:
                raise ValueError(f"the limit {field.name} must be at most {LONGEST_SECONDS}, not {value!r}")


DEFAULT_LIMITS = Limits()
