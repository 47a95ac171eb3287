"""A program in a container that is spoken to."""

import time
from collections.abc import Callable
from dataclasses import replace

from sandbox.containers.container import ContainerLostError, Order
from sandbox.containers.pool import Loan
from sandbox.result import Outcome, RunResult

_LATE_S = 10.0


class ContainerSession:
    """See `SandboxSession`; one thread at a time may use it.

    Args:
        loan: The container, in which the program was started.
        order: What was started.
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
        # By then the program has been ended, and what it has not read is thrown away.
        self._latest = time.monotonic() + order.limits.wall_seconds + _LATE_S
        self._unread = bytearray()
        self._result: RunResult | None = None

    @classmethod
    def of_result(cls, result: RunResult) -> "ContainerSession":
        """A session that has ended before it has begun."""
        session = cls.__new__(cls)
        session._loan = None
        session._unread = bytearray()
        session._result = result
        return session

    @property
    def alive(self) -> bool:
        """Whether the program runs."""
        self._look(time.monotonic())
        return self._result is None

    def write(self, data: bytes) -> None:
        """Write to its standard input; see `SandboxSession`."""
        if not self.alive or self._loan is None:
            raise BrokenPipeError("the program has ended")
        try:
            self._loan.container.give_input(data, self._latest)
        except ContainerLostError as error:
            self._lose(error)
            raise BrokenPipeError(str(error)) from error

    def read(self, timeout_seconds: float) -> bytes:
        """Return what it has written since; see `SandboxSession`."""
        deadline = time.monotonic() + timeout_seconds
        self._look(time.monotonic())
        if not self._unread and self._result is None:
            self._look(deadline)
        data = bytes(self._unread)
        self._unread.clear()
        return data

    def close(self) -> RunResult:
        """End it; see `SandboxSession`."""
        if self._result is None and self._loan is not None:
            deadline = time.monotonic() + _LATE_S
            try:
                self._loan.container.stop(deadline)
            except ContainerLostError as error:
                self._lose(error)
            while self._result is None and time.monotonic() < deadline:
                self._look(deadline)
        if self._result is None:
            # It goes with its container.
            self._finish(RunResult(outcome=Outcome.OK, detail="it was closed", compiling=self._compiling))
        assert self._result is not None
        return self._result

    def _look(self, deadline: float) -> None:
        """Take the news that there are; wait for some until the deadline."""
        while self._result is None and self._loan is not None:
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
            else:
                self._unread += news
                deadline = time.monotonic()

    def _lose(self, error: ContainerLostError) -> None:
        self._finish(replace(error.as_result(self._order.limits), compiling=self._compiling))

    def _finish(self, result: RunResult) -> None:
        self._result = result
        if self._loan is not None:
            self._give_back(self._loan)
            self._loan = None
