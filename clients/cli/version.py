"""`--version`, the same for every command; a module of its own, as servers and trainers have it without `roll-env`."""

from __future__ import annotations

import argparse
from importlib.metadata import PackageNotFoundError, version


def add_version(parser: argparse.ArgumentParser) -> None:
    """Let a command say which version it is of."""
    parser.add_argument(
        "--version", action="version", version=f"rollgym {_version()}", help="Print the version and exit."
    )


def _version() -> str:
    try:
        return version("rollgym")
    except PackageNotFoundError:
        # The tree is used as it is, without having been installed.
        return "(not installed)"
