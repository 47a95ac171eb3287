"""An interactive session with a program in a container."""

import time
from collections.abc import Callable
from dataclasses import replace

from rollgym.sandbox.containers.container import ContainerLostError, Order
from rollgym.sandbox.containers.pool import Loan
from rollgym.sandbox.core.result import Outcome, RunResult

_LATE_S = 10.0
_KEPT_BYTES = 4 * 1024 * 1024


class ContainerSession:
    """See `SandboxSession`; one thread at a time may use it, and any may hang up.

    Args:
        loan: The container, in which the program was started.
        order: The order that was started.
        compiling: How the compiler ended, if there was one.
        give_back: Called with the loan in the end.
    """

    def __init__(
        self, loan: Loan, order: Order, compiling: RunResult | None, give_back: Callable[[Loan], None]
    ) -> None:
        self._loan: Loan | None = loan
        self._order = order
        self._compiling = compiling
        self._give_back = give_back
        self._ends = time.monotonic() + order.limits.wall_seconds
        # By then the program has been ended, and its unread input is dropped.
        self._latest = self._ends + _LATE_S
        self._unread = bytearray()
        self._result: RunResult | None = None

    @property
    def alive(self) -> bool:
        """Whether the program is still running."""
        self._look(time.monotonic())
        return self._result is None

    def write(self, data: bytes) -> None:
        """Write to its standard input; see `SandboxSession`."""
        if not self.alive or self._loan is None:
            raise BrokenPipeError("the program has ended")
        try:
            self._loan.container.give_input(data, self._latest, held_until=self._ends)
        except ContainerLostError as error:
            self._lose(error)
            raise BrokenPipeError(str(error)) from error

    def read(self, timeout_seconds: float) -> bytes:
        """Return the new output; see `SandboxSession`."""
        deadline = time.monotonic() + timeout_seconds
        self._look(time.monotonic())
        if not self._unread and self._result is None:
            self._look(deadline)
        data = bytes(self._unread)
        self._unread.clear()
        return data

    def hang_up(self) -> None:
        """End it, from any thread; its container goes with it."""
        loan = self._loan
        if loan is not None:
            loan.container.hang_up()

    def close(self) -> RunResult:
        """End the program; see `SandboxSession`."""
        if self._result is None and self._loan is not None:
            deadline = time.monotonic() + _LATE_S
            try:
                self._loan.container.stop(deadline)
            except ContainerLostError as error:
                self._lose(error)
            while self._result is None and time.monotonic() < deadline:
                self._look(deadline, discards=True)
        if self._result is None:
            # It goes with its container.
            self._finish(RunResult(outcome=Outcome.OK, detail="it was closed", compiling=self._compiling))
        assert self._result is not None
        return self._result

    def _look(self, deadline: float, *, discards: bool = False) -> None:
        """Process the container's messages; wait for them until the deadline.

        While the program runs, output is read only up to the buffer's bound: the rest stays in the program's pipe until
        the caller reads.
        """
        while self._result is None and self._loan is not None:
            if not discards and len(self._unread) >= _KEPT_BYTES and time.monotonic() < self._ends:
                return
            try:
                if not self._loan.container.has_news(deadline):
                    return
                news = self._loan.container.news(self._order)
            except ContainerLostError as error:
                self._lose(error)
                return
            if isinstance(news, RunResult):
                self._loan.ended(news)
                self._finish(replace(news, compiling=self._compiling))
            elif not discards:
                self._unread += news
                deadline = time.monotonic()

    def _lose(self, error: ContainerLostError) -> None:
        self._finish(replace(error.as_result(self._order.limits), compiling=self._compiling))

    def _finish(self, result: RunResult) -> None:
        self._result = result
        if self._loan is not None:
            self._give_back(self._loan)
            self._loan = None
