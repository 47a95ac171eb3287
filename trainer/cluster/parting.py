"""Disconnects from a cluster that may no longer answer, with a time-out."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from enum import Enum


class Parting(Enum):
    """The result of disconnecting from a cluster."""

    IN_ORDER = "in order"
    """The cluster has noticed the disconnection, and has its devices back."""
    UNANSWERED = "unanswered"
    """The cluster did not answer in time, for example because its head is dead: it was left unchanged."""


def part(leave: Callable[[], None], timeout_s: float) -> Parting:
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
        return Parting.UNANSWERED
    left.result()
    return Parting.IN_ORDER
