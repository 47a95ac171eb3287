"""The sandbox that the operator of this process has chosen."""

import os
from functools import cache

from sandbox.core.base import Sandbox, SandboxUnavailableError
from sandbox.selection import open_sandbox

VARIABLE = "ROLLGYM_SANDBOX"


@cache
def operator_sandbox() -> Sandbox:
    """Return the sandbox that `ROLLGYM_SANDBOX` names, or the best that works here; never one that is no boundary.

    It is probed once, and all environments of a process share it.

    Raises:
        SandboxUnavailableError: If there is none, with the remedy.
    """
    try:
        return open_sandbox(os.environ.get(VARIABLE) or "auto")
    except ValueError as error:
        raise SandboxUnavailableError(f"the environment variable {VARIABLE} is wrong: {error}") from error
