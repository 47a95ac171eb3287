"""The sandbox that the operator of this process has chosen, and what is its fault and not a program's."""

from functools import cache

from rollgym.sandbox.core.base import Sandbox, SandboxUnavailableError
from rollgym.sandbox.core.naming import VARIABLE
from rollgym.sandbox.core.result import Outcome, RunResult
from rollgym.sandbox.selection import open_sandbox


@cache
def operator_sandbox() -> Sandbox:
    """Return the sandbox that `ROLLGYM_SANDBOX` names, or the best that works here; never one that is no boundary.

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
    """Go on only with a run that says something about its program.

    Raises:
        GraderFaultError: The sandbox failed.
    """
    if result.outcome is Outcome.SANDBOX_ERROR:
        raise GraderFaultError(f"the sandbox failed: {result.detail}")
