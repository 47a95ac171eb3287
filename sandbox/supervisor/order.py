"""The order for a run, from the server to the monitor."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rollgym.sandbox.core.limits import Limits


@dataclass(frozen=True, slots=True)
class Stage:
    """One command of a run: a compiler, or the program.

    Attributes:
        arguments: Its command line.
        wall_seconds: How long it may take.
        cpu_seconds: The limit of each of its processes.
        memory_mb: MiB of memory.
    """

    arguments: Sequence[str]
    wall_seconds: float
    cpu_seconds: float
    memory_mb: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The description of a run that the server sends to a monitor.

    Attributes:
        confinement: The name of what surrounds the run (`confinements.py`).
        stages: Run one after another, until one fails.
        limits: The limits of the last stage; stages name their differences.
        environment: Environment variables.
        directory: The working directory, as the program sees it.
        file_names: Files in it, by their relative paths; their contents travel beside the order.
        collect: Files to bring back.
        most_collected: The greatest size of such a file, in bytes.
        read_only: Directories to show besides the system's.
        cgroups: Whether to use control groups if they are writable.
        session: Whether this is an interactive session: its streams come with the order as descriptors.
        follows_input: Whether the last stage's input is read from a descriptor that comes with the order.
    """

    confinement: str
    stages: Sequence[Stage]
    limits: Limits
    environment: Mapping[str, str]
    directory: str
    file_names: Sequence[str] = ()
    collect: Sequence[str] = ()
    most_collected: int = 1 << 20
    read_only: Sequence[str] = field(default=())
    cgroups: bool = True
    session: bool = False
    follows_input: bool = False

    def as_head(self) -> dict[str, Any]:
        """Return it as the head of a message."""
        return asdict(self)

    @classmethod
    def from_head(cls, head: Mapping[str, Any]) -> "Order":
        """Read it from the head of a message."""
        values = dict(head)
        values["stages"] = [Stage(**stage) for stage in values["stages"]]
        values["limits"] = Limits(**values["limits"])
        return cls(**values)
