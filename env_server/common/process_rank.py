"""Which of a server's I/O processes this one is."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ProcessRank:
    """The place of one I/O process in its server.

    Attributes:
        index: From 0; also the first part of the ids of the sessions that this process owns.
        processes: How many I/O processes the server has.
        restarts: How often the process in this place has ended and was started again.
        directory: Where the processes of this server meet (journals, Unix sockets, shared tables), or None where
            a single process keeps no state on disk.
    """

    index: int = 0
    processes: int = 1
    directory: Path | None = None
    restarts: int = 0
