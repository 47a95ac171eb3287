"""Faults that are ours: they say nothing about a program, and are never a score."""

from sandbox.core.result import Outcome, RunResult


class GraderFaultError(RuntimeError):
    """A program could not be graded, through no fault of its own."""


def raise_faults(result: RunResult) -> None:
    """Go on only with a run that says something about its program.

    Raises:
        GraderFaultError: The sandbox failed.
    """
    if result.outcome is Outcome.SANDBOX_ERROR:
        raise GraderFaultError(f"the sandbox failed: {result.detail}")
