"""What has happened in a soak with fail-overs, and what may be lost by these."""

import time
from dataclasses import dataclass, field

from progress import Progress


class FailOver:
    """The time in which what was written down is lost.

    Args:
        since: When the replica was left behind, on the clock of this process.
    """

    def __init__(self, since: float) -> None:
        self.since = since
        self.until = float("inf")

    def ends(self, at: float) -> None:
        """Note when the replica took over."""
        self.until = at


class Use:
    """When a session was used: only then may a fail-over have taken something from it."""

    def __init__(self) -> None:
        self._calls: list[tuple[float, float]] = []

    def called(self, since: float) -> None:
        """Note a call that was sent then, and that has just been answered."""
        self._calls.append((since, time.monotonic()))

    def overlaps(self, failovers: list[FailOver]) -> bool:
        """Whether it was used while what was written down would be lost."""
        return any(
            since <= each.until and until >= each.since for since, until in self._calls for each in failovers
        )


@dataclass
class FailoverProgress(Progress):
    """What has happened so far.

    Attributes:
        sent_bytes: Bytes of the actions of all episodes that were played to their end.
        largest_bytes: Of the largest one.
        different: Answers that were not what the model says.
        lost_by_failover: How often a session that was used while the replica lagged has ended as `lost`.
        restored_by_client: How often our client has restored such a session.
        untyped: Answers without a code of the protocol.
    """

    sent_bytes: int = 0
    largest_bytes: int = 0
    different: list[str] = field(default_factory=list)
    lost_by_failover: int = 0
    restored_by_client: int = 0
    untyped: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._failovers: list[FailOver] = []

    def left_behind(self) -> FailOver:
        """Note that the replica lags from now on."""
        self._failovers.append(FailOver(time.monotonic()))
        return self._failovers[-1]

    def may_be_lost(self, use: Use) -> bool:
        """Whether a fail-over may have taken a session that was used so."""
        return use.overlaps(self._failovers)

    def played_one(self, name: str, digest: str, sizes: list[int]) -> None:
        """Note an episode that was played to its end."""
        self.played[name] = digest
        self.sent_bytes += sum(sizes)
        self.largest_bytes = max(self.largest_bytes, sum(sizes))
