"""What is installed: our own version, and the environments that other packages bring by their entry points."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from importlib.metadata import entry_points

from rollgym.version import __version__

GROUP = "rollgym.environments"
"""Entry points `Id-v0 = "module:Class"` of environments in other packages."""


@dataclass(frozen=True, slots=True)
class InstalledEnvironment:
    """An environment of another package.

    Attributes:
        path: `module:Class`.
        packages: The distributions that bring one of this name.
        ambiguous: Whether they mean different classes by it.
    """

    path: str
    packages: tuple[str, ...]
    ambiguous: bool


def installed_environments() -> dict[str, InstalledEnvironment]:
    """Return the environments that other packages bring, by id; nothing of them is imported."""
    found: dict[str, dict[str, str]] = {}
    for entry in entry_points(group=GROUP):
        package = "?" if entry.dist is None else entry.dist.name
        found.setdefault(entry.name, {})[package] = entry.value
    return {
        name: InstalledEnvironment(
            next(iter(paths.values())), tuple(sorted(paths)), len(set(paths.values())) > 1
        )
        for name, paths in sorted(found.items())
    }


def add_version(parser: argparse.ArgumentParser) -> None:
    """Let a command say which version it is of."""
    parser.add_argument(
        "--version", action="version", version=f"rollgym {__version__}", help="Print the version and exit."
    )
