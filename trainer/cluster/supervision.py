"""How often, and after how long, a run whose role has died is begun again. Pure: no clock and no process."""

from trainer.core.errors import RoleDiedError

_LONGEST_WAIT_S = 300.0


class Restarts:
    """Counts restarts of a run, and says how long the next one waits.

    What counts are those in a row that a new checkpoint did not come between: a run that gets on may lose a role now
    and then for weeks, and one that dies of itself ends soon.

    Args:
        limit: How many in a row.
        first_s: How long the first one waits; each further one waits twice as long, up to five minutes.
    """

    def __init__(self, limit: int, first_s: float) -> None:
        self._limit = limit
        self._first_s = first_s
        self._saved = -1
        self.in_a_row = 0

    def wait_s(self, saved: int) -> float | None:
        """Return how long to wait before the next restart, or None where it would be one too many.

        Args:
            saved: The step of the newest checkpoint; 0 if there is none.
        """
        if saved > self._saved:
            self.in_a_row, self._saved = 0, saved
        self.in_a_row += 1
        if self.in_a_row > self._limit:
            return None
        return min(_LONGEST_WAIT_S, self._first_s * 2.0 ** min(self.in_a_row - 1, 32))


def death_in(error: BaseException | None) -> RoleDiedError | None:
    """Return the death of a role that brought about an error, if one did.

    Where a role dies, cleaning up behind it may fail, too: the error that arrives is then another one.
    """
    seen: set[int] = set()
    pending = [error]
    while pending:
        each = pending.pop()
        if each is None or id(each) in seen:
            continue
        if isinstance(each, RoleDiedError):
            return each
        seen.add(id(each))
        pending += [each.__cause__, each.__context__]
        if isinstance(each, BaseExceptionGroup):
            pending += each.exceptions
    return None
