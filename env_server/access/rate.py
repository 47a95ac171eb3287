"""How many operations a token may call in a second."""

import math
import time

from clients.protocol.errors import ProblemError
from env_server.access.auth import Caller


class RateLimit:
    """One bucket for each token; it holds one second's worth of operations.

    Args:
        rate: Operations a second for tokens whose entry says nothing; None for no limit.
    """

    def __init__(self, rate: float | None) -> None:
        self._rate = rate
        self._buckets: dict[str, tuple[float, float]] = {}

    def of(self, caller: Caller) -> float | None:
        """How many operations a second a caller has; None for no limit."""
        return caller.quota.rate_limit or self._rate

    def take(self, caller: Caller) -> None:
        """Count one operation.

        Raises:
            ProblemError: `rate_limited`.
        """
        rate = self.of(caller)
        if rate is None:
            return
        now = time.monotonic()
        size = max(1.0, rate)
        level, filled_at = self._buckets.get(caller.name, (size, now))
        level = min(size, level + (now - filled_at) * rate)
        if level < 1.0:
            self._buckets[caller.name] = (level, now)
            raise ProblemError(
                "rate_limited",
                f"this token may call {rate:g} operations a second",
                retry_after=max(1, math.ceil((1.0 - level) / rate)),
            )
        self._buckets[caller.name] = (level - 1.0, now)
