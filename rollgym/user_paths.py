"""Paths as people write them: `~` at the beginning is a home folder, wherever no shell has replaced it."""

import argparse
import os
from pathlib import Path


def expand_user(text: str) -> str:
    """Return a path with its home folder in place of `~` or `~name` at its beginning; any other text as it is.

    Raises:
        ValueError: If nobody has this name, so that a folder called `~name` would come of it.
    """
    if not text.startswith("~"):
        return text
    found = os.path.expanduser(text)
    if found.startswith("~"):
        name = text.partition("/")[0]
        raise ValueError(
            f"{name[:60]!r} is no home folder: write ./{name[:60]} if a file or folder is called so"
        )
    return found


def user_path(text: str) -> Path:
    """Return the path of an argument of a command line, as `argparse` wants it."""
    try:
        return Path(expand_user(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
