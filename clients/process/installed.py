"""What is installed: our own version, and the environments that other packages bring by their entry points."""

from __future__ import annotations

import argparse

from rollgym.extensions import Extension, extensions
from rollgym.version import __version__

GROUP = "rollgym.environments"
"""Entry points `Id-v0 = "module:Class"` of environments in other packages."""


def installed_environments() -> dict[str, Extension]:
    """Return the environments that other packages bring, by id; nothing of them is imported."""
    return extensions(GROUP)


def add_version(parser: argparse.ArgumentParser) -> None:
    """Let a command say which version it is of."""
    parser.add_argument(
        "--version", action="version", version=f"rollgym {__version__}", help="Print the version and exit."
    )
