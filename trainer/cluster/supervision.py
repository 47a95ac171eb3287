"""How a run takes deaths: number and delays of restarts, and a time-out for a cluster that may no longer answer."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from enum import Enum

from rollgym.trainer.core.errors import RoleDiedError, RoleLostError

_LONGEST_WAIT_S = 300.0


class Restarts:
    """Counts restarts, and says how long the next one waits.

    What counts are those in a row that a new checkpoint did not come between: a run that gets on may lose a role now
    and then for weeks, and one that dies of itself ends soon.

    Args:
        limit: The number of restarts in a row.
        first_s: Delay of the first restart; each further one waits twice as long, up to five minutes.
    """

    def __init__(self, limit: int, first_s: float) -> None:
        self._limit = limit
        self._first_s = first_s
        self._saved = -1
        self.in_a_row = 0

    def wait_s(self, saved: int) -> float | None:
        """Return how long to wait before the next restart, or None if it would exceed the limit.

        Args:
            saved: The step of the newest checkpoint; 0 if there is none.
        """
        if saved > self._saved:
            self.in_a_row, self._saved = 0, saved
        self.in_a_row += 1
        if self.in_a_row > self._limit:
            return None
        return min(_LONGEST_WAIT_S, self._first_s * 2.0 ** min(self.in_a_row - 1, 32))


class RoleRestarts:
    """Restarts of all roles of a run, counted for each of them.

    Args:
        limit: The number of restarts of one role in a row.
        first_s: Delay of the first restart.
        saved: Says the step of the newest checkpoint; 0 if there is none.
    """

    def __init__(self, limit: int, first_s: float, saved: Callable[[], int]) -> None:
        self.limit = limit
        self._first_s = first_s
        self._saved = saved
        self._of: dict[str, Restarts] = {}

    def wait_s(self, died: RoleDiedError) -> float:
        """Return how long to wait before a role that has died is started again.

        Raises:
            RoleLostError: If it was started again too often.
        """
        restarts = self._of.setdefault(died.role, Restarts(self.limit, self._first_s))
        wait_s = restarts.wait_s(self._saved())
        if wait_s is None:
            raise RoleLostError(died.role, died.node, _lost(died, self.limit)) from died
        return wait_s

    def in_a_row(self, role: str) -> int:
        """How often a role was started again since the last checkpoint that was new."""
        return self._of[role].in_a_row if role in self._of else 0


def _lost(died: RoleDiedError, limit: int) -> str:
    """Return the message for a role that keeps dying."""
    if limit == 0:
        return f"{died}; nothing is started again (cluster.restarts 0)"
    return (
        f"{died.role} has died {limit + 1} times without a new checkpoint in between, which is more than it is started "
        f"again (cluster.restarts {limit}); the last time: {died}; {_remedy(died)}"
    )


def _remedy(died: RoleDiedError) -> str:
    """Return the remedy, for people."""
    if died.killed:
        return (
            "the system kills what takes more memory than there is: give the role more, or fewer and shorter rows "
            "(optimizer.tokens_per_micro_batch, rollout.max_concurrent_sequences)"
        )
    return "mend what its last words say"


def death_in(error: BaseException | None) -> RoleDiedError | None:
    """Return the death of a role that brought about an error, if one did.

    If a role dies, cleaning up after it may fail, too: the error that arrives is then a different one.
    """
    seen: set[int] = set()
    pending = [error]
    while pending:
        each = pending.pop()
        if each is None or id(each) in seen:
            continue
        if isinstance(each, RoleLostError):
            return None  # that was the last of its deaths
        if isinstance(each, RoleDiedError):
            return each
        seen.add(id(each))
        pending += [each.__cause__, each.__context__]
        if isinstance(each, BaseExceptionGroup):
            pending += each.exceptions
    return None


class Disconnection(Enum):
    """The result of disconnecting from a cluster."""

    IN_ORDER = "in order"
    """The cluster has noticed the disconnection, and has its devices back."""
    UNANSWERED = "unanswered"
    """The cluster did not answer in time, for example because its head is dead: it was left unchanged."""


def part(leave: Callable[[], None], timeout_s: float) -> Disconnection:
    """Leave a cluster, and wait for that no longer than it may take.

    Args:
        leave: Leaves it; it may wait for ever, and cannot be interrupted.
        timeout_s: How long to wait for the cluster.
    """
    left: Future[None] = Future()

    def leaving() -> None:
        try:
            leave()
        except Exception as error:  # noqa: BLE001 - it is raised in the waiting task
            left.set_exception(error)
        else:
            left.set_result(None)

    # A thread that hangs must not keep this process from ending.
    threading.Thread(target=leaving, name="leaving", daemon=True).start()
    if not wait([left], timeout_s).done:
        return Disconnection.UNANSWERED
    left.result()
    return Disconnection.IN_ORDER
