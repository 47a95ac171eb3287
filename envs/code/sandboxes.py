"""The sandbox that the operator of this process has chosen, and what a program may use in it while it is graded."""

import time
from dataclasses import dataclass
from functools import cache
from typing import Annotated

from pydantic import Field

from rollgym.envs.core.kwargs import OneOf
from rollgym.sandbox.core.base import Outcome, RunResult, Sandbox, SandboxUnavailableError
from rollgym.sandbox.core.kinds import VARIABLE
from rollgym.sandbox.selection import open_sandbox


@cache
def operator_sandbox() -> Sandbox:
    """Return the sandbox that `ROLLGYM_SANDBOX` names, or the best that works here; never one that is not a boundary.

    It is probed once, and all environments of a process share it.

    Raises:
        SandboxUnavailableError: If there is none, with the remedy.
    """
    try:
        return open_sandbox()
    except ValueError as error:
        raise SandboxUnavailableError(f"the environment variable {VARIABLE} is wrong: {error}") from error


class GraderFaultError(RuntimeError):
    """A program could not be graded, through no fault of its own: that says nothing about it, and is never a score."""


def raise_faults(result: RunResult) -> None:
    """Raise if a run says nothing about its program.

    Raises:
        GraderFaultError: The sandbox failed.
    """
    if result.outcome is Outcome.SANDBOX_ERROR:
        raise GraderFaultError(f"the sandbox failed: {result.detail}")


TestSeconds = Annotated[
    float,
    Field(
        gt=0,
        le=60,
        description="Processor time of one test; an item's own limit counts where it is longer.",
    ),
]
"""The kwarg `seconds` of an environment that grades programs."""

Scoring = Annotated[
    str,
    OneOf("fraction", "all"),
    Field(
        description=(
            "`fraction` for the share of the hidden tests that are passed, `all` for 1 if all of them are, or 0."
        )
    ),
]
"""The kwarg `scoring` of such an environment."""


@dataclass(frozen=True, slots=True)
class GradingLimits:
    """What a program may use.

    Attributes:
        seconds: Processor time of one test; it may take twice as long by the clock, and two seconds.
        total_seconds: Of all tests, by the clock.
        patience: Tests that may run out of time before the rest is not run any more.
        hurried_seconds: Processor time of one test once another has run out of time, so that a program that hangs
            costs little more than the time of one test; it may take twice as long by the clock.
        memory_mb: MiB of one test.
    """

    seconds: float = 6.0
    total_seconds: float = 50.0
    patience: int = 3
    hurried_seconds: float = 1.0
    memory_mb: int = 512

    @property
    def wall_seconds(self) -> float:
        """How long a test may take by the clock."""
        return 2 * self.seconds + 2

    def times(self, *, hurried: bool) -> dict[str, float]:
        """Return what one test may take: processor time, and time by the clock.

        Args:
            hurried: Whether another test has run out of time before.
        """
        if not hurried:
            return {"cpu_seconds": self.seconds, "wall_seconds": self.wall_seconds}
        seconds = min(self.seconds, self.hurried_seconds)
        return {"cpu_seconds": seconds, "wall_seconds": 2 * seconds}


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
