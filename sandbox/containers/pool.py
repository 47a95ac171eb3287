"""Warm containers, each used by one run at a time and replaced after some."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rollgym.sandbox.containers.container import Container, ContainerLostError
from rollgym.sandbox.containers.flags import Shape
from rollgym.sandbox.core.result import Outcome, RunResult

# After these a container has nothing but clean directories to show; after all others it is taken away.
_HARMLESS = frozenset({Outcome.OK, Outcome.NON_ZERO_EXIT, Outcome.TIME_LIMIT, Outcome.COMPILE_ERROR})


class Containers:
    """A bounded pool of containers; a borrower waits if none is free.

    Args:
        make: Makes a container.
        limit: The maximum number of containers.
        runs: How many programs a container may run.
    """

    def __init__(self, make: Callable[[Shape], Container], *, limit: int, runs: int) -> None:
        self._make = make
        self._limit = limit
        self._runs = runs
        self._changed = threading.Condition()
        self._idle: list[Container] = []
        self._count = 0
        self._epoch = 0

    @contextmanager
    def borrowed(self, shape: Shape) -> Iterator["Loan"]:
        """Lend a container of a shape; the borrower reports to the loan how it was used.

        Raises:
            ContainerLostError: If no container can be made.
        """
        loan = self.take(shape)
        try:
            yield loan
        finally:
            self.give_back(loan)

    def take(self, shape: Shape) -> "Loan":
        """Take a container until it is given back.

        Raises:
            ContainerLostError: If none can be made.
        """
        while True:
            loan = self._next(shape)
            try:
                loan.container.get_ready()
            except ContainerLostError:
                # The files of the previous program could not be deleted, or it has broken the container.
                self.give_back(loan)
                continue
            return loan

    def _next(self, shape: Shape) -> "Loan":
        with self._changed:
            epoch = self._epoch
            while True:
                fitting = next((each for each in self._idle if each.shape == shape), None)
                if fitting is not None:
                    self._idle.remove(fitting)
                    return Loan(fitting, epoch)
                # If there is no room for a new container, an idle one of another shape is removed.
                unfit = self._idle.pop(0) if self._count >= self._limit and self._idle else None
                if unfit is not None or self._count < self._limit:
                    self._count += unfit is None
                    break
                self._changed.wait()
        try:
            if unfit is not None:
                unfit.remove()
            return Loan(self._make(shape), epoch)
        except BaseException:
            self._one_less()
            raise

    def give_back(self, loan: "Loan") -> None:
        """Keep a container for the next program, or take it away."""
        container = loan.container
        with self._changed:
            if loan.harmless and container.runs < self._runs and loan.epoch == self._epoch:
                self._idle.append(container)
                self._changed.notify()
                return
        try:
            container.remove()
        finally:
            self._one_less()

    def close(self) -> None:
        """Remove idle containers now, and those in use when they are given back; new ones are made on demand."""
        with self._changed:
            self._epoch += 1
            idle, self._idle = self._idle, []
            self._count -= len(idle)
            self._changed.notify_all()
        for container in idle:
            container.remove()

    def _one_less(self) -> None:
        with self._changed:
            self._count -= 1
            self._changed.notify()


class Loan:
    """The use of a container.

    Attributes:
        container: It.
        epoch: How often all containers had been taken away when it was made.
        harmless: Whether it can be used again; it cannot unless it is said.
    """

    def __init__(self, container: Container, epoch: int) -> None:
        self.container = container
        self.epoch = epoch
        self.harmless = False

    def ended(self, result: RunResult) -> None:
        """Note how a run has ended."""
        self.harmless = result.outcome in _HARMLESS
