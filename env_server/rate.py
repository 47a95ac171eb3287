"""How many operations a token may call in a second."""

import math
import time

from clients.protocol.errors import ProblemError
from env_server.auth import Caller


class RateLimit:
    """One bucket for each token; it holds one second's worth of operations.

    Args:
        rate: Operations a second.
    """

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._size = max(1.0, rate)
        self._buckets: dict[str, tuple[float, float]] = {}

    def take(self, caller: Caller) -> None:
        """Count one operation.

        Raises:
            ProblemError: `rate_limited`.
        """
        now = time.monotonic()
        level, filled_at = self._buckets.get(caller.name, (self._size, now))
        level = min(self._size, level + (now - filled_at) * self._rate)
        if level < 1.0:
            self._buckets[caller.name] = (level, now)
            raise ProblemError(
                "rate_limited",
                f"this token may call {self._rate:g} operations a second",
                retry_after=max(1, math.ceil((1.0 - level) / self._rate)),
            )
        self._buckets[caller.name] = (level - 1.0, now)
