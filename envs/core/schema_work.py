"""Limits of validating one value: looks, recursion depth, and seconds of patterns."""

import time
from collections.abc import Hashable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from rollgym.envs.core import patterns
from rollgym.envs.core.patterns import TooMuchWorkError

ITEMS_OF_A_LOOK = 50
"""How many items one look may go through."""

_VALUES_OF_A_LOOK = 50


@dataclass(frozen=True, slots=True)
class ReadSchema:
    """A schema that was looked at, and what is known of it by the identities of its parts.

    Attributes:
        schema: It.
        targets: Target of a part's `$ref`.
        allowed: The keys of what the `enum`, and of what the `const`, of a part allow.
    """

    schema: Mapping[str, Any]
    targets: Mapping[int, Any]
    allowed: Mapping[tuple[int, str], frozenset[Hashable]]


class Work:
    """How often something was looked at, within how many other looks one is, and how long patterns may still take.

    Args:
        read: The schema.
        most: Largest number of looks.
    """

    def __init__(self, read: ReadSchema, most: float) -> None:
        self.read = read
        self.depth = 0
        self._left = most
        self._seconds = patterns.SECONDS

    def look(self, looks: int = 1) -> None:
        """Count looks.

        Raises:
            TooMuchWorkError: There were too many.
        """
        self._left -= looks
        if self._left < 0:
            raise TooMuchWorkError("the schema takes too much work on this value")

    def compare(self, value: Any) -> None:
        """Count the visited parts of a value that is compared as a whole."""
        waiting = [value]
        size = 0
        while waiting:
            part = waiting.pop()
            if isinstance(part, Mapping | list | tuple):
                size += len(part)
                waiting.extend(part.values() if isinstance(part, Mapping) else part)
        self.look(size // _VALUES_OF_A_LOOK)

    def searches(self, pattern: str, text: str) -> bool:
        """Whether a pattern is found in a text. Raises like `patterns.searches`."""
        begun = time.monotonic()
        try:
            return patterns.searches(pattern, text, seconds=self._seconds)
        finally:
            self._seconds -= time.monotonic() - begun


WORK: ContextVar[Work] = ContextVar("work")
