"""The commit of the checkout that is measured."""

import subprocess
from pathlib import Path

_HOME = Path(__file__).absolute().parents[3]


def revision(folder: Path = _HOME, *, short: bool = False) -> str:
    """Return the commit that a checkout holds; "unknown" for a copy without its history.

    Args:
        folder: The checkout; the tree that this module is of, unless another is named.
        short: Whether to shorten it.
    """
    command = ["git", "-C", str(folder), "rev-parse", "--show-cdup", *(["--short"] if short else []), "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:  # git is not installed
        return "unknown"
    way_up, _, commit = done.stdout.partition("\n")
    # A copy may lie within a checkout of another project, whose commit says nothing of it.
    return commit.strip() if done.returncode == 0 and not way_up else "unknown"
