"""One I/O process of a server: its rank, its phase (starting, ready or draining), and why it takes no sessions."""

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Literal, NamedTuple

from rollgym.clients.protocol.errors import ProblemError

_RETRY_S = 2
ReasonCode = Literal[
    "starting",
    "draining",
    "registrations",
    "workers",
    "threads",
    "state_dir",
    "journal",
    "process_away",
]
"""Why a server is not ready."""


@dataclass(frozen=True, slots=True)
class ProcessRank:
    """The rank of an I/O process in its server.

    Attributes:
        index: Its rank, from 0; also the first part of the ids of the sessions that this process owns.
        processes: How many I/O processes the server has.
        restarts: How often the process of this rank was restarted.
        directory: The directory that the processes of this server share (journals, Unix sockets, shared tables), or
            None if a single process keeps no state on disk.
    """

    index: int = 0
    processes: int = 1
    directory: Path | None = None
    restarts: int = 0


class Phase(Enum):
    """The phases of a server's life."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


class Reason(NamedTuple):
    """One reason why an I/O process is not ready. It is public: it names no paths.

    Attributes:
        code: One of the documented codes.
        detail: A sentence for people.
        process: The process that is not ready.
    """

    code: ReasonCode
    detail: str
    process: int


class Lifecycle:
    """The phase of this process."""

    def __init__(self) -> None:
        self.phase = Phase.STARTING

    def require_open(self) -> None:
        """Refuse an operation that would begin a new session, unless the server is ready.

        Raises:
            ProblemError: `draining`.
        """
        if self.phase is not Phase.READY:
            raise self._problem()

    def require_started(self) -> None:
        """Refuse an operation that needs the sessions and environments, until they are known.

        Raises:
            ProblemError: `draining`.
        """
        if self.phase is Phase.STARTING:
            raise self._problem()

    def _problem(self) -> ProblemError:
        return ProblemError("draining", f"the server is {self.phase.value}", retry_after=_RETRY_S)


def going_away() -> ProblemError:
    """The problem that a server ends before it has an answer."""
    return ProblemError("draining", "the server is going away", retry_after=_RETRY_S)
