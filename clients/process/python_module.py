"""The command that runs a module of this package in another Python process."""

import sys
from pathlib import Path

_HOME = Path(__file__).absolute().parents[3]
"""The folder that `rollgym` lies in."""


def python_module(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module of this package.

    `python -m` alone would search the working directory first for every import, and a `rollgym.py`, a `random.py` or a
    folder `numpy` of the user would shadow the module that the process needs.

    Args:
        module: Its name.
        arguments: Its arguments.
    """
    # With a source tree that is not installed, only the working directory may lead to `rollgym`.
    path = [] if Path.cwd() == _HOME else ["-P"]
    return [sys.executable, *path, "-m", module, *arguments]
