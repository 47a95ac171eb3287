"""What a program may use while it is graded."""

import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a program may use.

    Attributes:
        seconds: Processor time of one test; it may take twice as long by the clock, and two seconds.
        total_seconds: Of all tests, by the clock.
        patience: Tests that may run out of time before the rest is not run any more.
        memory_mb: MiB of one test.
    """

    seconds: float = 6.0
    total_seconds: float = 50.0
    patience: int = 3
    memory_mb: int = 512

    @property
    def wall_seconds(self) -> float:
        """How long a test may take by the clock."""
        return 2 * self.seconds + 2


class Deadline:
    """When all tests of a program must be done.

    Args:
        seconds: From now.
    """

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds that are left; below zero afterwards."""
        return self._end - time.monotonic()
