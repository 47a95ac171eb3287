"""How many Ray actors there should be."""

import math
from typing import NamedTuple


class ScalingPolicy(NamedTuple):
    """The operator's settings for the number of actors.

    Attributes:
        min_actors: The minimum number of actors.
        max_actors: The maximum number of actors.
        sessions_per_actor: The target number of sessions for one actor.
        operations_per_actor: The target average of running and waiting operations for one actor.
        idle_timeout_s: An actor is released after so many seconds without need.
        start_timeout_s: An environment waits at most so many seconds for an actor.
    """

    min_actors: int
    max_actors: int
    sessions_per_actor: int
    operations_per_actor: float
    idle_timeout_s: float
    start_timeout_s: float

    def wanted(self, sessions: int, operations: float) -> int:
        """The number of actors for a load.

        Args:
            sessions: Sessions that there are or that are being made.
            operations: Operations that are running or waiting, on average over the last seconds.
        """
        for_sessions = math.ceil(sessions / self.sessions_per_actor)
        # The small remainder of a decaying average does not count as load.
        for_operations = math.ceil(operations / self.operations_per_actor - 1e-3)
        return min(self.max_actors, max(self.min_actors, for_sessions, for_operations))


class Average:
    """The mean of a number that changes now and then, over the last seconds.

    Args:
        now: The time at which it is 0.
    """

    def __init__(self, now: float) -> None:
        self.value = 0.0
        self._area = 0.0
        self._current = 0
        self._changed = now
        self._looked = now

    def change(self, current: int, now: float) -> None:
        """Note the number's new value."""
        self._area += self._current * (now - self._changed)
        self._current = current
        self._changed = now

    def look(self, now: float, weight: float) -> float:
        """Update the running mean with the average since the last look, by a weight; return it."""
        self.change(self._current, now)
        if now > self._looked:
            self.value += weight * (self._area / (now - self._looked) - self.value)
            self._looked = now
            self._area = 0.0
        return self.value
