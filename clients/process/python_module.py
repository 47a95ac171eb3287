"""The command that runs a module of ours in another Python process."""

import sys
from pathlib import Path

_HOME = Path(__file__).absolute().parents[3]
"""The folder that `rollgym` lies in."""


def python_module(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module of ours.

    `python -m` alone would look for every import in the working directory first, where a `rollgym.py`, a `random.py`
    or a folder `numpy` of the user's would take the place of what the process needs.

    Args:
        module: Its name.
        arguments: Its arguments.
    """
    # In a tree that is not installed, the working directory may be the only place where `rollgym` is found.
    path = [] if Path.cwd() == _HOME else ["-P"]
    return [sys.executable, *path, "-m", module, *arguments]
